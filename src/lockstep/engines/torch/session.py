"""One model on PyTorch devices: its step functions, and what the loop needs of it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import keras
import numpy as np
import torch
import torch.distributed as dist

from lockstep.attach.holders import check_shared, holders_of
from lockstep.checkpoint.data_position import recorded_type
from lockstep.core.engine import (
    PREDICT,
    TRAIN,
    Execute,
    Guard,
    Home,
    Kind,
    Methods,
    Session,
    Snapshot,
)
from lockstep.core.fit_lines import sharded_words
from lockstep.core.layout import DataParallel, Layout
from lockstep.core.left_out import LeftOutUsed
from lockstep.core.patched import patched
from lockstep.core.state import bytes_of, named_variables, optimizers_of, variables_of
from lockstep.core.status import STATUS_OF_PROCESS
from lockstep.engines.replicas.first_step import is_checked
from lockstep.engines.replicas.sketches import Sketches
from lockstep.engines.torch.exchange.placement import (
    copies,
    move_model,
    torch_device_of,
    version_of,
)
from lockstep.engines.torch.ranks.launcher_group import joined
from lockstep.engines.torch.ranks.launcher_peers import LauncherPeers
from lockstep.engines.torch.ranks.peers import NoPeers, Peers
from lockstep.engines.torch.ranks.pool import Lease
from lockstep.engines.torch.ranks.pool_peers import PoolPeers
from lockstep.engines.torch.ranks.step_plans import (
    BUILDS,
    BY_ROWS,
    ON_WHOLE_BATCH,
    StepPlans,
)
from lockstep.engines.torch.ranks.step_runner import StepRunner, TracesLost
from lockstep.engines.torch.sharded.sharded_variables import (
    is_sharded,
    made_on_host,
    parts_for_pytorch,
)
from lockstep.engines.torch.steps.layers import copied_states
from lockstep.engines.torch.steps.loss_sharding import LossSharding
from lockstep.engines.torch.steps.replica import OtherRows
from lockstep.engines.torch.steps.split_checks import is_asked_for, rows_of, unpacked, why_custom
from lockstep.errors import (
    LayoutConflict,
    UnsupportedBackend,
    UnsupportedModel,
    counted,
)
from lockstep.keras_compat import (
    XLA,
    build_on_first_batch,
    is_built,
    layers_in,
    number_of_rows,
    stored_value,
    wrapped_by_keras,
)
from lockstep.processes.agreement import DataCheck
from lockstep.training.callbacks import may_write_between_steps, shows_bar
from lockstep.training.input import HostIterator, drawn, iterator_of_keras


class TorchSession(Session):
    """One model in this process, by Keras's own steps; see `Session`.

    Without a checkpoint, the batches are those of Keras's own iterator: PyTorch draws the order
    of the rows, as on one device. A `DataLoader` does not tell its position. Under a checkpoint
    NumPy draws the order, as on other backends, and batches come from the host.
    """

    def __init__(self, model: Any, layout: Layout) -> None:
        super().__init__(model, layout)
        self._find_homes()
        self._check()

    def _find_homes(self) -> None:
        """Decide where the variables are to be."""

    def _check(self) -> None:
        """Raise if the model cannot be on these devices."""
        for variable in variables_of(self.model):
            check_shared(self, variable)
        if len(self.devices) > 1:
            check_reduced_once(self.model)

    def step_function(self, kind: Kind, force: bool) -> Callable[[Any], Any]:
        """Return the step function of the model, or a new one; variables are laid out before."""
        known: Callable[[Any], Any] | None = getattr(self.model, kind.function)
        self._adopt(first=known is None)
        return self._made(kind) if force or known is None else known

    def _adopt(self, first: bool) -> None:
        """Lay out variables that are new.

        Args:
            first: Whether there is no step function yet.
        """

    def _made(self, kind: Kind) -> Callable[[Any], Any]:
        """Make the step function; Keras checks the options, and makes it for one device."""
        model = self.model
        if len(self.devices) > 1:  # this may have changed since
            check_reduced_once(model)
        getattr(type(model), f"make_{kind.function}")(model, force=True)
        return self._run(kind.name, getattr(model, kind.function))

    def _run(self, kind: str, plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the step function, given that of Keras."""

        def run(batches: Any) -> Any:
            result = self._step(kind, partial(self._on_one, plain), iter(batches))
            STATUS_OF_PROCESS.stepped()
            return result if kind == "predict" else copies(result)

        return run

    def _on_one(self, plain: Callable[[Any], Any], batches: list[Any]) -> Any:
        """Run a step of Keras in this process."""
        with copied_states(self.model):
            return plain([as_tensors(batch) for batch in batches])

    def _step(self, kind: str, plain: Callable[[Any], Any], batches: Iterator[Any]) -> Any:
        """Run a step on the next batch, given the function that runs it in this process."""
        return plain([next(batches)])

    def recorded(self, batch: Any) -> list[Sketches] | None:
        """Return the sketches of each replica of a step, `None` if this process runs it alone."""
        return None

    def draw_together(self) -> None:
        """Let every device draw the random numbers of the global batch, as one device does."""

    # ------------------------------------------------------------ in a loop

    def batches(self, kind: Kind, *, recorded: bool = False, **data: Any) -> Any:
        """Return Keras's iterator over a `DataLoader`, or a recorded one over host batches."""
        made = recorded_type(kind, HostIterator) if recorded else iterator_of_keras()
        return made(**data)

    def build(self, batches: Any, kind: Kind) -> None:
        """Build what the first step needs, and reset the iterator, as Keras does."""
        if kind is TRAIN and isinstance(batches, HostIterator) and batches.recorded:
            _check_state(self.model)
        self._build_on(batches, kind)
        if kind is not TRAIN:
            self.model.eval()

    def _build_on(self, batches: Any, kind: Kind) -> None:
        if kind is not PREDICT:  # Keras's `predict` resets nothing: data may count the resets
            build_on_first_batch(self.model, batches)
            batches.reset()

    def is_compiled(self) -> bool:
        """Return whether the first call of a step function compiles it."""
        return False

    @contextmanager
    def epoch(self, kind: Kind, batches: Any, callbacks: Any) -> Iterator[Execute]:
        """Run the steps of one epoch, in the mode of `torch.nn.Module` that Keras sets."""
        if kind is TRAIN:
            self.model.train()
        yield partial(self._execute, kind, batches)
        self.model.eval()

    def _execute(self, kind: Kind, batches: Any, iterator: Iterator[Any], times: int) -> Any:
        if isinstance(batches, HostIterator):
            iterator = self._drawn(batches, iterator, times)
        return kind.function_of(self.model)(iterator)

    def _drawn(self, batches: HostIterator, iterator: Iterator[Any], times: int) -> Iterator[Any]:
        """Draw the batches of one execution."""
        return drawn(iterator, times)

    def snapshot(self, logs: dict[str, Any], *, writes: bool) -> Snapshot | None:
        """Copy every variable and the logs of the last step; later steps write in place."""
        if not writes:
            for variable in filter(is_sharded, named_variables(self.model).values()):
                _ = variable.value  # every process takes part
            return None
        named = {name: _copy_of(v) for name, v in named_variables(self.model).items()}
        variables = len(named)
        # `dict.items` bypasses the fetch of `LazyLogs`.
        for name, value in dict.items(logs):
            if value is not None and not isinstance(value, str | bytes):  # added by a callback
                named[f"logs/{name}"] = torch.as_tensor(value).detach().clone()
        arrays = [
            (name, keras.backend.standardize_dtype(tensor.dtype), tuple(tensor.shape))
            for name, tensor in named.items()
        ]
        return Snapshot(variables, arrays, map(keras.ops.convert_to_numpy, named.values()))


def _copy_of(variable: Any) -> Any:
    """Copy the value of a variable: to the host, if no device has it whole."""
    value = variable.value.detach()
    return value.cpu() if is_sharded(variable) else value.clone()


def _check_state(model: Any) -> None:
    """Raise if a step may change what a checkpoint does not save."""
    saved = {id(stored_value(variable)) for variable in variables_of(model)}
    # Layers of a Sequential or functional model are no modules of the model.
    layers = layers_in(model)
    modules = [module for layer in layers for module in layer.modules()]
    # Among what Keras gives to PyTorch are kernels that `quantize` has replaced: nobody reads them.
    of_keras = [module for module in modules if isinstance(module, keras.layers.Layer)]
    saved |= {id(tensor) for layer in of_keras for tensor in layer.torch_params.values()}
    found: dict[int, str] = {}
    with parts_for_pytorch():
        for layer in layers:
            for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
                found.setdefault(id(tensor), f"{name} of {layer.name!r}")
    others = [name for tensor, name in found.items() if tensor not in saved]
    for layer in layers:
        names = (name for name, _ in optimizers_of(layer))
        others += [f"{name} of {layer.name!r}" for name in names if name != "optimizer"]
    if others:
        raise UnsupportedModel(
            f"A step may change {', '.join(others)}, but lockstep.Checkpoint saves only the "
            "variables\nof layers and the optimizer of compile. Create variables with "
            "add_weight. With several optimizers,\nuse keras.callbacks.BackupAndRestore."
        )


def as_tensors(nest: Any) -> Any:
    """Convert arrays of the host, as Keras's `DataLoader` does."""
    if type(nest) is tuple and all(type(leaf) is torch.Tensor for leaf in nest):
        return nest
    return keras.tree.map_structure(
        lambda leaf: keras.ops.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf,
        nest,
    )


def check_reduced_once(model: Any) -> None:
    """Raise if Keras would sum gradients over processes too."""
    if wrapped_by_keras(model):
        raise LayoutConflict(
            f"{model.name!r} cannot be distributed, because Keras has wrapped it in "
            "DistributedDataParallel, which also reduces gradients.\n"
            "Build a new model, without torch.distributed.init_process_group."
        )
    # From 3.16 on, Keras wraps a model in `make_train_function` if there is a default group.
    if dist.is_initialized():
        raise UnsupportedBackend(
            "Several devices were requested on 'torch', but the process has called "
            "torch.distributed.init_process_group.\nLockstep connects the processes itself, "
            "including those of torchrun. Remove that call, and any\nDistributedSampler "
            "(DataLoader(shuffle=True) shuffles). In Ray Train, use DataParallelTrainer."
        )
    if keras.distribution.distribution() is not None:
        raise LayoutConflict(
            "Several devices were requested on 'torch', but a keras.distribution is set, which "
            "also reduces gradients.\nCall keras.distribution.set_distribution(None) first."
        )


Plain = Callable[[Any], Any]
"""Runs a step of Keras in this process, on a list of batches."""


class SplitSession(TorchSession):
    """One model on several devices, or on one: each process has a rank; see `Session`."""

    def __init__(self, model: Any, layout: Layout) -> None:
        super().__init__(model, layout)
        self._peers = _peers_of(model, self.devices)
        self._peers.check_devices(self.devices)
        self._runner = StepRunner(self._peers)
        self._splits = len(self.devices) > 1 or layout.micro_batch_size is not None
        self._autocast = _AutocastCheck(model, self._peers.rank.device)
        if isinstance(layout, DataParallel) and layout.same_random_numbers:
            self.draw_together()
        self._plans = StepPlans(model, self._runner, layout, partial(self._adopt, first=False))

    # ------------------------------------------------------------ on and off the devices

    def open(self) -> None:
        """Start the other processes, and move the variables to the device of this one."""
        self._peers.start()
        move_model(self.model, self._peers.rank.device)
        self._adopt(first=True)

    def close(self) -> None:
        """Undo `open`, even if it failed halfway."""
        shards = self._runner.shards
        for variable in shards.variables:
            holders_of(variable).discard(self)
        self._runner.bring_home(shards.variables)
        self._peers.end()

    def _adopt(self, first: bool) -> None:
        """Compare new variables with those of the other processes, or shard them."""
        self._runner.leave_host(sharded=self.layout.is_sharded)
        self._peers.adopt(first=first)
        if self.layout.is_sharded and is_built(self.model):
            self._lay_out()

    def _lay_out(self) -> None:
        self._runner.lay_out()
        for variable in self._runner.shards.variables:
            holders_of(variable).add(self)

    def home(self, variable: Any) -> Home:
        """Return where a variable of the model is. One in shards belongs to one model."""
        shards = len(self.devices) if is_sharded(variable) else 1
        return Home(self if self.layout.is_sharded else None, shards)

    def methods(self, methods: Methods, guarded: Guard) -> Methods:
        """Return the methods of all engines, and those of several processes."""
        if self.layout.is_sharded and hasattr(self.model, "export"):
            methods["export"] = self._no_export
        return self._peers.methods(methods, is_sharded=self.layout.is_sharded)

    def _no_export(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedModel(
            f"{self.model.name!r} cannot be exported, because its variables are sharded across "
            "processes.\nAn exported program needs all of them.\nCall lockstep.release(model) "
            "first, or save the model, and export the loaded one."
        )

    def remarks(self) -> str:
        """Return the end of the line that `fit` prints."""
        line = ""
        workers = self._peers.to_start()
        if workers:
            line += f", starting {counted(workers, 'process')} for the other devices"
        if self.layout.is_sharded:
            line += self._sharded_words()
        if self.model.jit_compile:
            in_parts = self.layout.is_sharded or self.layout.micro_batch_size is not None
            line += ", not traced" if in_parts else ", traced"
        draws = any("seed_generator_state" in v.path for v in self.model.non_trainable_variables)
        if self._splits and draws:
            apart = "each device" if self.layout.micro_batch_size is None else "each micro-batch"
            together = self._runner.rank.draws_together or is_asked_for(self.model)
            whose = "one device" if together else apart
            line += f", with random numbers of {whose}"
        return line

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
            self._adopt(first=False)
        sizes = [(v.path, bytes_of(v), self.home(v).shards) for v in variables_of(model)]
        return sharded_words(sizes, len(self.devices))

    def _made(self, kind: Kind) -> Callable[[Any], Any]:
        """Make the step function: on several devices, or on one where it cannot be split."""
        with patched([(self.model, XLA, False)]):  # it is traced, without torch.compile
            function = super()._made(kind)
        self._plans.forget(kind.name)
        return function

    def _step(self, kind: str, plain: Plain, batches: Iterator[Any]) -> Any:
        batch = self._runner.next_batch(batches)
        if self._splits:
            self._autocast.check(kind)
        is_routed = self._splits or is_asked_for(self.model)
        if is_asked_for(self.model):  # a graph does, and so do the steps before it
            self.draw_together()
        result = self._by_route(kind, plain, batch) if is_routed else plain([batch])
        self._runner.note_values()
        return result

    def _by_route(self, kind: str, plain: Plain, batch: Any) -> Any:
        """Run a step on all devices, or on the first one where it cannot be split."""
        plans, runner, batch = self._plans, self._runner, as_tensors(batch)
        route = plans.of(kind, batch)
        try:
            if route.how == BY_ROWS:
                data = unpacked(batch)
                try:
                    result = runner.step(kind, data, rows_of(data[0])[1], route.plan)
                except OtherRows as found:
                    plans.has_other_rows(kind, found)
                    return plain([batch])
                plans.ran_by_rows()
                return result
            if route.how == ON_WHOLE_BATCH:
                result = runner.step_on_whole_batch(kind, batch)
                plans.ran_on_whole_batch(kind, route)
                return result
            if route.trace is not None:
                with suppress(TracesLost):
                    number, draws = route.trace.number, route.trace.draws
                    return runner.traced_step(number, kind, batch, draws=draws)
                plans.traces_are_lost()
        except LeftOutUsed as used:
            raise UnsupportedModel(
                f"A {kind} step of {self.model.name!r} uses {used}.\nThe processes of the other "
                "devices do not have it. Keep it out of the step, or call\n"
                "lockstep.release(model)."
            ) from used
        result = plain([batch])
        if route.how == BUILDS:
            plans.built(kind)
            runner.peers.take_first_values()
        return result

    def recorded(self, batch: Any) -> list[Sketches] | None:
        """Return the sketches of each replica of a step, `None` if this process runs it alone."""
        if len(self.devices) == 1:
            return None
        self._runner.has_changed()
        with suppress(LeftOutUsed):
            reason, data, rows = self._plans.split("train", batch)
            if reason is None:
                return self._runner.recorded("train", data, rows, self._plans.plan(None))[1]
        return None

    @property
    def graphs_run(self) -> int:
        """How many steps ran as graphs."""
        return self._runner.graphs_run

    @property
    def losses(self) -> LossSharding:
        """How the losses and metrics of the model are computed."""
        return self._runner.losses

    def draw_together(self) -> None:
        """Let every device draw the random numbers of the global batch, as one device does."""
        self._runner.rank.draws_together = True

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

    def first_work(self, kind: Kind, steps: int) -> str | None:
        """Return what the next step waits for."""
        if steps or not self._splits:
            return super().first_work(kind, steps)
        workers = self._peers.to_start()
        work = [f"starting {counted(workers, 'process')}"] if workers else []
        work += ["reading its batch"]
        if is_checked():
            work += ["comparing the step with one device (LOCKSTEP_CHECK=0 skips this)"]
        elif not workers:
            return super().first_work(kind, steps)
        return ", ".join(work)

    @contextmanager
    def epoch(self, kind: Kind, batches: Any, callbacks: Any) -> Iterator[Execute]:
        """Run the steps of one epoch; what callbacks may change is compared before each step."""
        if self._splits:
            self._autocast.check(kind.name, several_steps=True)
        changes = may_write_between_steps(callbacks, kind.name)
        own_data = number_of_rows(batches.data_adapter) is None
        prints = shows_bar(callbacks)
        with (
            super().epoch(kind, batches, callbacks) as execute,
            self._plans.epoch(kind.name, changes=changes, own_data=own_data, prints=prints),
        ):
            yield execute

    def call(self, name: str) -> AbstractContextManager[object]:
        """Run a method of the model inside the context."""
        self._plans.begin_call(name)
        return super().call(name)

    def _drawn(self, batches: HostIterator, iterator: Iterator[Any], times: int) -> Iterator[Any]:
        """Draw the batches of one execution, once every process has as many."""
        if not self._peers.in_script:
            return super()._drawn(batches, iterator, times)
        return iter(batches.agreed(lambda: [next(iterator)], self._runner.assignments()))


class _AutocastCheck:
    """Refuses steps for which `torch.autocast` keeps casts of weights that have changed since.

    It keeps them until its context ends. So one device, too, computes with old weights there.

    Args:
        model: The model.
        device: The device of the weights.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._marker: Any = None
        self._versions: dict[int, Any] = {}

    def check(self, kind: str, *, several_steps: bool = False) -> None:
        """Raise if a step would compute with such casts.

        Args:
            kind: `"train"`, `"test"` or `"predict"`.
            several_steps: Whether more steps of this kind follow.

        Raises:
            UnsupportedModel: If it would.
        """
        enabled = torch.is_autocast_enabled(self._device.type)
        if not (enabled and torch.is_autocast_cache_enabled()):
            return
        tensors = [stored_value(weight) for weight in self._model.trainable_variables]
        versions = {id(each): version_of(each) for each in tensors if each is not None}
        if self._is_another_context():
            self._versions = versions
        known = self._versions
        several_updates = several_steps or why_custom(self._model, kind) is not None
        if (kind == "train" and several_updates) or any(
            known.get(each, now) != now for each, now in versions.items()
        ):
            raise UnsupportedModel(
                f"Steps of {self._model.name!r} run inside torch.autocast. It caches the "
                "weights from before the first\nupdate until its context ends, even on one "
                "device. Pass cache_enabled=False to it,\nor create the model under "
                'keras.config.set_dtype_policy("mixed_bfloat16") instead.'
            )

    def _is_another_context(self) -> bool:
        """Return whether autocast has no cast of the marker: it was 0, and is 1 since."""
        if self._marker is not None and not self._cast_of_marker():
            return False
        self._marker = torch.nn.Parameter(torch.zeros((1, 1), device=self._device))
        self._cast_of_marker()
        with torch.no_grad():
            self._marker.fill_(1)
        return True

    def _cast_of_marker(self) -> float:
        return float(torch.mm(self._marker, torch.ones_like(self._marker)).detach())


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


def _peers_of(model: Any, devices: tuple[str, ...]) -> Peers:
    group = joined()
    if group is None and len(devices) == 1:
        return NoPeers(model, torch_device_of(devices[0]))
    if group is None:
        return PoolPeers(model, torch_device_of(devices[0]), Lease(devices))
    return LauncherPeers(model, group)
