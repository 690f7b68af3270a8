"""Run the calls of a model's layers in the scopes of their devices."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lockstep.engines.jax.branches.program_cut import device_scope
from lockstep.keras_compat import functional_of, run_graph, sublayers_of
from lockstep.layout import Layout

_RUN_GRAPH = "_run_through_graph"  # keras/src/ops/function.py, Function


class CallScopes:
    """Replaces, on the instances, how functional graphs run and how layers are called.

    Args:
        model: The model.
        layout: Where its layers run.
    """

    def __init__(self, model: Any, layout: Layout) -> None:
        self._layout = layout
        self._numbers = {name: number for number, name in enumerate(layout.devices)}
        self._replaced: list[tuple[Any, str, Any]] = []
        self._model = model

    def put_on(self) -> None:
        """Replace the methods."""
        self._walk(self._model, set())

    def take_off(self) -> None:
        """Undo `put_on`, except for methods that were replaced again since."""
        for owner, name, method in self._replaced:
            if vars(owner).get(name) is method:
                del vars(owner)[name]
        self._replaced.clear()

    def _walk(self, layer: Any, seen: set[int]) -> None:
        if id(layer) in seen:
            return
        seen.add(id(layer))
        function = functional_of(layer)
        if function is not None:
            self._replace(function, _RUN_GRAPH, functools.partial(_run, function, self._around))
        for inner in sublayers_of(layer):
            if function is None and self._layout.home(inner) != self._layout.home(layer):
                number = self._numbers[self._layout.home(inner)]
                self._replace(inner, "call", _scoped(inner.call, number))
            self._walk(inner, seen)

    def _around(self, node: Any) -> AbstractContextManager[Any]:
        scope: AbstractContextManager[Any] = device_scope(
            self._numbers[self._layout.calls[id(node)]]
        )
        return scope

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        if name not in vars(owner):
            vars(owner)[name] = method
            self._replaced.append((owner, name, method))


def _run(
    function: Any,
    around: Callable[[Any], Any],
    inputs: Any,
    operation_fn: Callable[[Any], Any] = lambda operation: operation,
    call_fn: Any = None,
) -> Any:
    return run_graph(function, around, inputs, operation_fn, call_fn)


def _scoped(call: Callable[..., Any], device: int) -> Callable[..., Any]:
    @functools.wraps(call)
    def call_in_scope(*args: Any, **kwargs: Any) -> Any:
        with device_scope(device):
            return call(*args, **kwargs)

    return call_in_scope
