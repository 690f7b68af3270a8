"""One model on several PyTorch devices, each of which has a process."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import keras
import torch

from lockstep.engines.holders import holders_of
from lockstep.engines.left_out import LeftOutUsed
from lockstep.engines.replicas.first_step import (
    GRADIENT,
    LOG,
    Computed,
    Difference,
    FirstSteps,
    check_declared_losses,
    compare,
    distrusted_part,
    form_of,
    is_checked,
    said_to_be_exact,
)
from lockstep.engines.torch.first_step import calls_watched, recorded_step, stock_step
from lockstep.engines.torch.launcher_peers import LauncherPeers
from lockstep.engines.torch.layers import Plan
from lockstep.engines.torch.loss_sharding import LossSharding
from lockstep.engines.torch.peers import Peers
from lockstep.engines.torch.placement import move_model, torch_device_of
from lockstep.engines.torch.pool import Lease
from lockstep.engines.torch.pool_peers import PoolPeers
from lockstep.engines.torch.session import TorchFitState, TorchSession, as_tensor, copies
from lockstep.engines.torch.sharded_variables import is_sharded, made_on_host
from lockstep.engines.torch.split_checks import rows_of, why_custom
from lockstep.engines.torch.stateful import copied_states
from lockstep.engines.torch.step_runner import StepRunner
from lockstep.engines.torch.torch_group import joined
from lockstep.errors import UnsplitBatchWarning, UnsupportedModel, counted
from lockstep.fit_lines import sharded_words
from lockstep.keras_compat import build_on_first_batch, is_built, layers_in
from lockstep.layout import Layout
from lockstep.processes import process_group
from lockstep.processes.agreement import DataCheck
from lockstep.state import bytes_of, unique, variables_of
from lockstep.training.build import build, is_ready_for_custom_step, unbuilt
from lockstep.training.call_guard import CallGuard
from lockstep.training.callbacks import may_write_between_steps
from lockstep.training.input import HostIterator
from lockstep.training.session import PREDICT, Execute, Kind, recorded_type

Plain = Callable[[Any], Any]
"""Runs a step of Keras in this process, on a list of batches."""


class SplitSession(TorchSession):
    """One model on several devices, or on one: each process has a rank; see `Session`."""

    def __init__(self, model: Any, layout: Layout) -> None:
        super().__init__(model, layout)
        self._peers = _peers_of(model, self.devices)
        self._runner = StepRunner(self._peers)
        self._splits = len(self.devices) > 1
        self._warned: set[str] = set()
        self._begun: set[str] = set()
        self._left_unbuilt: dict[str, list[Any]] = {}
        self._unshared: set[str] = set()
        self._with_left_out: dict[str, str] = {}
        self._is_updating = False
        self._first_steps = FirstSteps(model)

    # ------------------------------------------------------------ on and off the devices

    def check(self) -> None:
        """Raise if the model cannot be on these devices."""
        super().check()
        self._peers.check_devices(self.devices)

    def open(self) -> None:
        """Move the variables to the device of this process."""
        move_model(self.model, self._peers.rank.device)
        self.adopt(first=True)

    def close(self) -> None:
        """Undo `open`, even if it failed halfway."""
        shards = self._runner.shards
        for variable in shards.variables:
            holders_of(variable).discard(self)
        self._runner.bring_home(shards.variables)
        self._peers.end()

    def adopt(self, first: bool) -> None:
        """Compare new variables with those of the other processes, or shard them."""
        self._runner.leave_host(sharded=self.layout.is_sharded)
        self._peers.adopt(first=first)
        if self.layout.is_sharded and is_built(self.model):
            self._lay_out()

    def _lay_out(self) -> None:
        self._runner.lay_out()
        for variable in self._runner.shards.variables:
            holders_of(variable).add(self)

    def home(self, variable: Any) -> Any:
        """Return the device of a variable of the model, `None` if it is on every device.

        A variable in shards belongs to one model.
        """
        return self if self.layout.is_sharded else None

    def shards(self, variable: Any) -> int:
        """Return the number of shards of a variable, 1 if each device has it whole."""
        return len(self.devices) if is_sharded(variable) else 1

    def methods(self, methods: dict[str, Any], turns: CallGuard) -> dict[str, Any]:
        """Return the methods of all engines, and those of several processes."""
        if self.layout.is_sharded and hasattr(self.model, "export"):
            methods["export"] = self._no_export
        return self._peers.methods(methods, is_sharded=self.layout.is_sharded)

    def _no_export(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedModel(
            f"{self.model.name!r} was to be exported, and each process has a part of its "
            "variables.\nAn exported program has all of them.\n"
            "Call lockstep.release(model) first, or save the model, and export the loaded one."
        )

    def remarks(self) -> str:
        """Return the end of the line that `fit` prints."""
        line = ""
        workers = self._peers.to_start()
        if workers:
            line += f", starting {counted(workers, 'process')} for the other devices"
        if self.layout.is_sharded:
            line += self._sharded_words()
        ignored = self._splits and self.model.jit_compile
        line += ", without torch.compile" if ignored else ""
        draws = any("seed_generator_state" in v.path for v in self.model.non_trainable_variables)
        return line + (", with random numbers of each device" if self._splits and draws else "")

    def _build_optimizer(self) -> None:
        """Build the optimizer of a built model, as a training step would now."""
        model = self.model
        if model.optimizer is not None and is_built(model) and not model.optimizer.built:
            scope = keras.name_scope(model.optimizer.name, caller=model.optimizer)
            with scope, made_on_host(len(self.devices)):
                model.optimizer.build(model.trainable_variables)

    def _sharded_words(self) -> str:
        model = self.model
        if is_built(model):
            self._build_optimizer()
            self.adopt(first=False)
        sizes = [(v.path, bytes_of(v), self.shards(v)) for v in variables_of(model)]
        return sharded_words(sizes, len(self.devices))

    def step_function(self, kind: Kind) -> Callable[[Any], Any]:
        """Make the step function: on several devices, or on one where it cannot be split."""
        function = super().step_function(kind)
        self._first_steps.forget(kind.name)
        self._with_left_out.pop(kind.name, None)
        return function

    def _step(self, kind: str, plain: Plain, batches: Iterator[Any]) -> Any:
        batch = self._runner.drawn(batches)
        if self._splits:
            batch = keras.tree.map_structure(as_tensor, batch)
            result = self._step_by_all(kind, plain, batch)
        else:
            result = plain([batch])
        self._runner.ran()
        return result

    def inspect(self, batch: Any) -> Any:
        """Return layer outputs and gradients of a step, `None` if this process runs it alone."""
        if not self._splits:
            return None
        try:
            reason, data, rows = self._split("train", batch)
            return None if reason is not None else self._runner.step("inspect", data, rows)
        except LeftOutUsed:
            return None

    @property
    def losses(self) -> LossSharding:
        """How the losses and metrics of the model are computed."""
        return self._runner.losses

    def draw_together(self) -> None:
        """Let every device draw the random numbers of the global batch, as one device does."""
        self._runner.rank.draws_together = True

    def _split(self, kind: str, batch: Any) -> tuple[str | None, Any, int]:
        """Return why a batch cannot be split, `None` if it can; the batch, and its rows."""
        reason = why_custom(self.model, kind)
        if reason is not None:
            return reason, None, 0
        data = _tensors(batch)
        reason, rows = rows_of(data[0])
        return reason or self._runner.unsplit(data[0]), data, rows

    def _step_by_all(self, kind: str, plain: Plain, batch: Any) -> Any:
        """Run a step on all devices. The first one runs it alone if it has what workers lack."""
        if kind not in self._with_left_out:
            try:
                return self._step_by_ranks(kind, plain, batch)
            except LeftOutUsed as used:
                if self._is_updating:
                    raise UnsupportedModel(
                        f"A {kind} step of {self.model.name!r} uses {used}.\n"
                        "The processes of its devices cannot do so. Keep it out of the step, or "
                        "call\nlockstep.release(model)."
                    ) from used
                self._with_left_out[kind] = str(used)
        return self._step_alone(plain, batch, f"uses {self._with_left_out[kind]}")

    def _step_by_ranks(self, kind: str, plain: Plain, batch: Any) -> Any:
        self._is_updating = False
        if self.layout.is_sharded and (self._runner.unchecked or self._must_build(kind)):
            with made_on_host(len(self.devices)):
                build(self.model, kind, batch)
            self.adopt(first=False)
        elif self._must_build(kind):
            if not self._peers.in_script:
                result = plain([batch])  # which builds the model
                self._left_unbuilt[kind] = unbuilt(self.model, kind)
                return result
            with torch.no_grad():  # each process builds it, and then takes the first one's values
                self.model(keras.utils.unpack_x_y_sample_weight(batch)[0])
            self._left_unbuilt[kind] = unbuilt(self.model, kind)
            self._peers.adopt(first=False)
        reason, data, rows = self._split(kind, batch)
        self._runner.agree_on_plan(reason)
        if reason is not None:
            return self._step_on_whole_batch(kind, plain, batch, reason)
        self._compare_first_step(kind, data, rows)
        if kind in self._first_steps.alone:
            return self._step_alone(plain, batch, self._first_steps.alone[kind])
        self._is_updating = True
        result = self._runner.step(kind, data, rows)
        self._warn_of_whole(self._runner.whole_layers)
        self._warn_of_gathered(self._runner.losses.large)
        return result

    def _must_build(self, kind: str) -> bool:
        """Return whether one device has to run the next step, as it makes variables."""
        if why_custom(self.model, kind) is None:
            if not self._runner.unchecked:
                return False
            # What a step has left unbuilt, it does without, such as a `compute_loss` of its own.
            left = set(map(id, self._left_unbuilt.get(kind, [])))
            return any(id(part) not in left for part in unbuilt(self.model, kind))
        # A GAN, say, has no `call` and is never built: the first batch builds its parts.
        first = kind not in self._begun
        self._begun.add(kind)
        return first and not is_ready_for_custom_step(self.model, kind)

    def _compare_first_step(self, kind: str, data: Any, rows: int) -> None:
        """Compare a step of a new form with that of one device, before any update."""
        model, runner, size = self.model, self._runner, len(self.devices)
        form = self._form(data)
        if not self._first_steps.is_due(kind, form, lambda: Plan(model).candidates):
            return

        def together(some: Any, count: int) -> Computed:
            several, sketches = runner.recorded(kind, copies(some), count)
            return sketches, several.dtypes

        def distrust(found: Difference) -> str | None:
            part = distrusted_part(
                found, model, runner.plan.parts, runner.distrusted, is_custom=False
            )
            if part is None and found.kind in (LOG, GRADIENT) and runner.losses.by_rows:
                check_declared_losses(found, model)
                runner.losses.by_rows = False
                return "its losses"
            return part

        self._first_steps.settle(
            kind,
            lambda: runner.peers.agreed_difference(
                compare(model, data, rows, size, partial(self._recorded_alone, kind), together)
            ),
            distrust,
        )

    def _compare_first_custom_step(self, kind: str, batch: Any) -> None:
        """Compare a step of the user's own of a new form with that of one device."""
        model, runner = self.model, self._runner
        if not self._first_steps.is_due(kind, self._form(batch), list):
            return
        leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None and leaf.ndim]
        rows = {len(leaf) for leaf in leaves}

        alone = partial(self._recorded_alone, kind, is_custom=True)

        def together(some: Any, count: int) -> Computed:
            several = runner.recorded_on_whole_batch(kind, copies(some))
            return [several.sketches()], several.dtypes

        def distrust(found: Difference) -> Any:
            layers = layers_in(model)
            return distrusted_part(
                found, model, layers, runner.whole_batch.distrusted, is_custom=True
            )

        if len(rows) == 1:
            count = rows.pop()
            self._first_steps.settle(
                kind,
                lambda: compare(model, batch, count, len(self.devices), alone, together),
                distrust,
            )

    def _form(self, data: Any) -> Any:
        """Return what a first step is the first of: workers with other code are compared again."""
        return form_of(data), min(max(self._peers.times_sent, 1), _MOST_SENT)

    def _recorded_alone(self, kind: str, data: Any, *, is_custom: bool = False) -> Computed:
        tensors = self._runner.tensors()
        weights = [*self.model.variables, *self.model.trainable_variables]
        with copied_states(self.model), self._runner.shards.whole_here(unique(weights)):
            one = recorded_step(
                self.model,
                # Keras multiplies sample weights by a mask in place.
                lambda: stock_step(self.model, kind, copies(data)),
                is_custom=is_custom,
                tensors=tensors,
                watch=partial(calls_watched, self.model) if is_custom else None,
            )
        return [one.sketches()], one.dtypes

    def _step_on_whole_batch(self, kind: str, plain: Plain, batch: Any, reason: str) -> Any:
        """Run a step that looks at the whole batch: on every device, or else on the first one."""
        runner = self._runner
        if self.layout.is_sharded:
            return self._step_alone(plain, batch, reason)
        if kind not in self._unshared:
            unshared = runner.unshared(batch)
            if unshared is None:
                self._compare_first_custom_step(kind, batch)
                if kind in self._first_steps.alone:
                    self._warn_of_alone(self._first_steps.alone[kind])
                    return plain([batch])
                self._is_updating = True
                result = runner.step_on_whole_batch(kind, batch)
                if runner.whole_batch.shared:
                    self._warn_of_whole(runner.whole_batch.whole)
                    return result
                unshared = "and calls no layer that works row by row"
                self._unshared.add(kind)
                self._warn_of_alone(reason, unshared)
                return result  # all devices have computed the same
            self._warn_of_alone(reason, unshared)
        return plain([batch])

    def _step_alone(self, plain: Plain, batch: Any, reason: str) -> Any:
        if self.layout.is_sharded:
            raise UnsupportedModel(
                f"{self.model.name!r} {reason},\nso one device would have to run every batch "
                "alone, and the state is sharded.\n"
                'Leave out state="sharded", or set KERAS_BACKEND=jax.'
            )
        self._warn_of_alone(reason)
        return plain([batch])

    def _warn_of_alone(self, *reasons: str) -> None:
        what = " ".join([repr(self.model.name), *reasons])
        self._warn(f"{what},\nso the first device runs every batch alone")

    def _warn_of_whole(self, layers: dict[str, str]) -> None:
        if layers:
            names = ", ".join(f"{name!r} ({reason})" for name, reason in layers.items())
            what = f"every device runs {names} of {self.model.name!r} on the whole batch"
            self._warn(what, _DECLARE)

    def _warn_of_gathered(self, large: dict[str, str]) -> None:
        if large:
            names = ", ".join(f"{name!r} ({reason})" for name, reason in large.items())
            what = f"every device gathers the outputs of {self.model.name!r} for {names}"
            self._warn(what)

    def _warn(self, what: str, remedy: str = "") -> None:
        if what not in self._warned and process_group.is_first():
            self._warned.add(what)
            warnings.warn(
                f"On PyTorch {what}.\n{said_to_be_exact(what)}{remedy}"
                "Set KERAS_BACKEND=jax to have it split.",
                UnsplitBatchWarning,
                stacklevel=2,
            )

    # ------------------------------------------------------------ in a loop

    def batches(self, kind: Kind, *, recorded: bool = False, **data: Any) -> Any:
        """Return the iterator over the batches; several scripts compare what they draw."""
        if not self._peers.in_script:
            return super().batches(kind, recorded=recorded, **data)
        return recorded_type(kind, ComparedIterator)(**data) if recorded else ComparedLoader(**data)

    def _build_on(self, batches: Any, kind: Kind) -> None:
        model = self.model
        with made_on_host(len(self.devices)) if self.layout.is_sharded else nullcontext():
            if not isinstance(batches, ComparedIterator):
                super()._build_on(batches, kind)
            elif kind is not PREDICT:
                batches.build(lambda: build_on_first_batch(model, batches))
            elif not is_built(model):
                batches.build(lambda: _call(model, batches))

    def fit_state(self) -> TorchFitState:
        """Return access to the variables, for a checkpoint of one `fit`."""
        return TorchFitState(self.model, self._peers.in_script and self.layout.is_sharded)

    def first_work(self) -> str | None:
        """Return what is done before a first step runs."""
        if len(self.devices) == 1 or not is_checked():
            return super().first_work()
        return (
            "reading its batch, and comparing the step with one device (LOCKSTEP_CHECK=0 leaves "
            "this out)"
        )

    def epoch(self, kind: Kind, batches: Any, callbacks: Any, run: Callable[[Execute], Any]) -> Any:
        """Run the steps of one epoch; what callbacks may change is compared before each step."""
        with self._runner.epoch(changes=may_write_between_steps(callbacks, kind.name)):
            return super().epoch(kind, batches, callbacks, run)

    def _drawn(self, batches: HostIterator, iterator: Iterator[Any], times: int) -> Iterator[Any]:
        """Draw the batches of one execution, once every process has as many."""
        if not self._peers.in_script:
            return super()._drawn(batches, iterator, times)
        return iter(batches.agreed(lambda: [next(iterator)], self._runner.noted()))


class ComparedIterator(HostIterator):
    """Host batches that are compared with those of the other processes."""

    def _new_check(self) -> DataCheck:
        return DataCheck(every_pull=True)


class ComparedLoader(ComparedIterator):
    """The batches of Keras's `DataLoader`, in the order that PyTorch draws."""

    def _batches(self) -> Iterator[Any]:
        # keras/src/backend/torch/trainer.py, TorchEpochIterator
        return iter(self.data_adapter.get_torch_dataloader())


def _call(model: Any, batches: HostIterator) -> None:
    """Build the layers of a model that has never been called, on the first batch."""
    for _, _, iterator in batches:
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(next(iterator))
        with torch.no_grad():
            model(inputs)
        break


_MOST_SENT = 4
"""How often steps are compared again because the model was sent anew, at most."""

_DECLARE = "If each row depends on its own row alone, declare it: lockstep.rowwise. "


def _tensors(data: Any) -> tuple[Any, Any, Any]:
    """Return inputs, targets and sample weights as tensors, as Keras converts them first."""
    parts: tuple[Any, Any, Any] = keras.tree.map_structure(
        lambda leaf: None if leaf is None else keras.ops.convert_to_tensor(leaf),
        tuple(keras.utils.unpack_x_y_sample_weight(data)),
    )
    return parts


def _peers_of(model: Any, devices: tuple[str, ...]) -> Peers:
    group = joined()
    if group is None:
        return PoolPeers(model, torch_device_of(devices[0]), Lease(devices))
    return LauncherPeers(model, group)
