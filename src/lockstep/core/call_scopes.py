"""Run the calls of a model's layers in the scopes of their devices."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lockstep.core.layout import Branches
from lockstep.core.patched import Replaced
from lockstep.keras_compat import RUN_GRAPH, functional_of, run_graph, sublayers_of

Scope = Callable[[str, Any], AbstractContextManager[Any]]
"""Makes the context of one call of an operation, such as a layer, on the device with this name."""


class CallScopes:
    """Replaces, on the instances, how functional graphs run and how layers are called.

    Args:
        model: The model.
        layout: Where its layers run.
        scope: Makes the scopes.
    """

    def __init__(self, model: Any, layout: Branches, scope: Scope) -> None:
        self._layout = layout
        self._scope = scope
        self._replaced = Replaced()
        self._model = model

    def put_on(self) -> None:
        """Replace the methods."""
        self._walk(self._model, set())

    def take_off(self) -> None:
        """Undo `put_on`, except for methods that were replaced again since."""
        self._replaced.undo()

    def _walk(self, layer: Any, seen: set[int]) -> None:
        if id(layer) in seen:
            return
        seen.add(id(layer))
        has_graph = functional_of(layer) is layer
        if has_graph:
            self._replaced.replace(layer, RUN_GRAPH, functools.partial(_run, layer, self._around))
        for inner in sublayers_of(layer):
            # The graph of a Sequential model is made anew by `add` and `pop`.
            if not has_graph and id(inner) in self._layout.fixed:
                self._replaced.replace(inner, "call", self._scoped(inner))
            self._walk(inner, seen)

    def _around(self, node: Any) -> AbstractContextManager[Any]:
        if id(node) not in self._layout.fixed:
            return nullcontext()
        return self._scope(self._layout.calls[id(node)], node.operation)

    def _scoped(self, layer: Any) -> Callable[..., Any]:
        call, device = layer.call, self._layout.home(layer)

        @functools.wraps(call)
        def call_in_scope(*args: Any, **kwargs: Any) -> Any:
            with self._scope(device, layer):
                return call(*args, **kwargs)

        return call_in_scope


def _run(
    function: Any,
    around: Callable[[Any], Any],
    inputs: Any,
    operation_fn: Callable[[Any], Any] = lambda operation: operation,
    call_fn: Any = None,
) -> Any:
    return run_graph(function, around, inputs, operation_fn, call_fn)
