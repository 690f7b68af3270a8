"""Keras's JAX steps over a mesh.

A step sees the global batch. The host batch is padded to a multiple of the number of devices by
repeating its last row, and then sharded. Inside the compiled step the padding is sliced off under a
sharding constraint, for which JAX allows uneven shards. The partitioner thus handles the uneven
split, the result is that of one device, and the padding never reaches the model.
"""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import sparse
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from lockstep.core.devices import missing_rows
from lockstep.core.status import STATUS_OF_PROCESS
from lockstep.engines.jax.processes import jax_group, program_fingerprint
from lockstep.engines.jax.steps.execution import Program, State, StepFunction
from lockstep.engines.jax.steps.padded import (
    PaddedArray,
    is_padded,
    laid_out,
    longer,
    shapes_of,
    undivided,
    whole_rows,
)
from lockstep.engines.jax.steps.partition_fallbacks import pooling_whole, why_whole
from lockstep.engines.jax.steps.scan import (
    MOST_NUMBERS,
    can_be_stacked,
    changed_groups,
    every_row,
    few_bytes,
    is_short,
    is_worth_it,
    last,
    merged,
    most_batches,
    repeated,
    stacked,
)
from lockstep.engines.jax.steps.state_layout import (
    Replicated,
    ShardedVariable,
    drop_shards,
    hold_in_shards,
    is_held_in_shards,
    numbered,
)
from lockstep.errors import UnsplitBatchWarning, UnsupportedModel
from lockstep.processes import process_group
from lockstep.processes.agreement import DataCheck
from lockstep.processes.row_exchange import RowsHere
from lockstep.training.arrays import host_array, is_native
from lockstep.training.input import BatchesAhead

_DELETED = (
    "A variable shares its array with another model, as after `a.assign(b)`, and that model was "
    "then trained.\nJAX deletes the input arrays of a training step, so the value is lost.\n"
    "Assign it again as a copy: `a.assign(keras.ops.copy(b))`."
)


class Programs:
    """Turn Keras's steps into step functions over one mesh.

    Attributes:
        replicated: The layout of arrays that every device has.
        by_rows: The layout of data: sharded along the first dim.
        devices: The devices, in order.
        platform: The platform of the devices: `"cpu"` or `"gpu"`.
        ahead: Puts batches on the devices a step ahead; `None` on CPUs, which read host memory.
        state_layout: Where the variables are.
        is_whole: Whether the step that is traced gets all rows on every device.

    Args:
        devices: The devices, in order.
        state: Makes the layout of the variables from the mesh.
    """

    ahead: BatchesAhead | None = None
    is_whole = False

    def __init__(
        self, devices: list[jax.Device], state: Callable[[Mesh], Replicated] = Replicated
    ) -> None:
        self.devices = devices
        self.platform: str = devices[0].platform
        self._replicas = len(devices)
        mesh = Mesh(np.array(devices), ("batch",))
        self.state_layout = state(mesh)
        self.replicated = self.state_layout.replicated
        self.by_rows = NamedSharding(mesh, PartitionSpec("batch"))
        self._several = process_group.several()
        self._known_counts: dict[tuple[int, ...], bool] = {}
        # JAX 0.10.2 over gloo deadlocks with some thirty steps in flight, if each of several
        # processes has several (rehearsed) devices.
        here = len(mesh.local_devices)
        self._one_at_a_time = self._several and self.platform == "cpu" and here > 1
        self._put: Callable[[Any, Any], jax.Array] = jax_group.put if self._several else laid_out
        self._stacked_by_rows = NamedSharding(mesh, PartitionSpec(None, "batch"))
        self.draws_ahead = self.platform != "cpu"
        self.ahead = BatchesAhead(self._shard) if self.draws_ahead else None

    def divides(self, rows: int) -> bool:
        """Return whether an array of `rows` rows can be sharded, on more than one device."""
        return self._replicas > 1 and not self._several and missing_rows(rows, self._replicas) == 0

    def start(self) -> None:
        """Prepare the layers of the model."""

    def stop(self) -> None:
        """Undo `start`."""

    def adopt(self) -> None:
        """Decide where variables are that were created since the last call."""
        self.state_layout.adopt()

    def hold(self, variables: list[Any]) -> None:
        """Move variables to their shards, and out of the shards of other devices."""
        for variable in variables:
            home, value = self.home(variable), variable.value
            splits = isinstance(home, NamedSharding) and not home.is_fully_replicated
            if value.sharding != home and (splits or is_held_in_shards(variable)):
                drop_shards(variable)
                value = jax_group.whole(value)
                if splits or not self._several:  # outside a step, each process has it whole
                    value = self.moved(value, home)
                variable.assign(value)
            if splits and not isinstance(variable, ShardedVariable):
                hold_in_shards(variable, value)
        numbered(variables)

    def home(self, variable: Any) -> Sharding:
        """Return the layout of a variable outside a step."""
        return self.state_layout.home(variable)

    def call(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the model directly, outside its steps."""
        args, kwargs = keras.tree.map_structure(self.on_mesh, (args, kwargs))
        return call(*args, **kwargs)

    # ------------------------------------------------------------ step functions

    def compiled(
        self,
        step: Program,
        split: Callable[[], frozenset[int]],
        *,
        times: int,
        per_row_outputs: bool,
        trains: bool = False,
        complete: Callable[[], bool] = lambda: True,
        options: dict[str, str] | None = None,
    ) -> StepFunction:
        """Return a compiled step function.

        Args:
            step: Keras's `train_step` or `test_step`, or a predicting step.
            split: Returns the positions of the non-trainable variables that are sharded by rows.
                All other variables are replicated.
            times: `steps_per_execution`.
            per_row_outputs: Whether outputs stay sharded by rows, as predictions do. Otherwise they
                are replicated, as logs are.
            trains: Whether the step trains: it then donates its state. Any other step returns only
                the groups of variables that it changes. JAX would copy all others.
            complete: Returns whether every metric is built. A step that builds metrics runs alone.
            options: Options of the compiler.
        """
        made = CompiledStep(self, step, split, per_row_outputs, trains, complete, options)
        stacks = not (per_row_outputs and self._several)
        finish = whole_rows if made.stay_split else _as_they_are
        return StepFunction(
            place=self._shard if self.ahead is None else self.ahead.placed,
            settle=lambda state: self.settled(state, split()),
            run=made.run,
            finish=finish if per_row_outputs else None,
            times=times,
            check_program=made.check if self._replicas > 1 else None,
            batches_to_pull=made.batches_to_pull if stacks else None,
            stack=made.stack if stacks else None,
            data_check=DataCheck(every_pull=True, whole=True) if self._several else None,
            to_local=partial(jax.tree.map, jax_group.GROUP.local) if self._several else None,
            one_at_a_time=self._one_at_a_time,
            is_short=made.is_short if self.platform == "cpu" and not self._several else None,
        )

    def eager(
        self,
        step: Program,
        split: Callable[[], frozenset[int]],
        *,
        times: int,
        per_row_outputs: bool,
    ) -> StepFunction:
        """Return a step function that runs operation by operation, for `run_eagerly`.

        Outside a program JAX supports even shards only. A batch that does not divide is replicated:
        the result is exact, and every device repeats the work.
        """

        def run(state: State, batch: Any) -> tuple[Any, State]:
            with pooling_whole(self.replicated):
                return step(self.settled(state, split()), batch)

        return StepFunction(
            place=lambda batch: keras.tree.map_structure(self._place_eagerly, batch),
            settle=lambda state: state,
            run=run,
            finish=_as_they_are if per_row_outputs else None,
            times=times,
        )

    # ------------------------------------------------------------------ placement

    def settled(self, state: State, split: frozenset[int] = frozenset()) -> State:
        """Return the state with every array in its layout and no array twice.

        An array that a callback assigned is on one device and would cause a compilation. An array
        that two variables share cannot be donated.

        Raises:
            UnsupportedModel: If an array is deleted. XLA would end the process.
        """
        seen: set[int] = set()

        def settle(value: Any, layout: NamedSharding) -> Any:
            if isinstance(value, jax.Array) and value.is_deleted():
                raise UnsupportedModel(_DELETED)
            if id(value) in seen:
                value = jnp.copy(value)
            seen.add(id(value))
            if getattr(value, "sharding", None) == layout:
                return value
            return self.moved(value, layout)

        layouts = self._layouts(state, split)
        return tuple([*map(settle, *pair)] for pair in zip(state, layouts, strict=True))

    def moved(self, value: Any, layout: Sharding) -> Any:
        """Return the array in another layout, in memory that no other code writes into.

        On CPUs JAX may share the memory of a NumPy array that was assigned.
        """
        own = np.array(jax_group.GROUP.local(value)) if self.platform == "cpu" else value
        return self._put(own, layout)

    def _layouts(self, state: State, split: frozenset[int]) -> list[list[NamedSharding]]:
        layouts = self.state_layout.of_state(state)
        for position in split:
            layouts[1][position] = self.by_rows
        return layouts

    def on_mesh(self, value: Any) -> Any:
        """Return the value, copied to every device if it is on other devices.

        JAX itself moves every other value: only a concrete JAX array that is committed to its
        devices is copied.
        """
        if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
            return value
        if self._several:  # a direct call uses this process's variables
            return jax_group.GROUP.local(value)
        if not value.committed or value.sharding.device_set == self.replicated.device_set:
            return value
        return jax.device_put(value, self.replicated)

    def _shard(self, batch: Any) -> Any:
        if self._replicas == 1:
            leaves = batch if type(batch) is tuple else (batch,)
            if self.ahead is None and all(map(is_native, leaves)):
                return batch
            return keras.tree.map_structure(self._place_on_one, batch)
        return keras.tree.map_structure(self._shard_leaf, batch)

    def _place_on_one(self, leaf: Any) -> Any:
        if leaf is None or (self.ahead is None and is_native(leaf)):
            return leaf
        placed = isinstance(leaf, jax.Array | sparse.JAXSparse)
        return jax.device_put(leaf if placed else host_array(leaf), self.replicated)

    def _shard_leaf(self, leaf: Any) -> Any:
        if leaf is None:
            return None
        if isinstance(leaf, sparse.JAXSparse):
            if self._several:
                raise UnsupportedModel(
                    "Sparse inputs were given, but JAX cannot shard sparse arrays across "
                    "several processes.\nPass dense arrays."
                )
            return jax.device_put(leaf, self.replicated)
        if isinstance(leaf, RowsHere):
            read: Any = leaf.__getitem__
            put = jax.make_array_from_callback(leaf.shape, self.by_rows, read)
            return PaddedArray(put, leaf.shape[0])
        if not isinstance(leaf, jax.Array):
            leaf = host_array(leaf)
        if leaf.ndim == 0 or leaf.shape[0] == 0:
            return self._put(leaf, self.replicated)
        rows = leaf.shape[0]
        missing = missing_rows(rows, self._replicas)
        if missing:
            numpy = jnp if isinstance(leaf, jax.Array) else np
            leaf = numpy.concatenate([leaf, numpy.repeat(leaf[-1:], missing, axis=0)])
        return PaddedArray(self._put(leaf, self.by_rows), rows)

    def rows_stay(self, counts: tuple[int, ...]) -> bool:
        """Return whether the devices of each process need the rows that it has.

        Args:
            counts: The rows of each process in a global batch.
        """
        if counts not in self._known_counts:
            self._known_counts[counts] = self._do_rows_stay(counts)
        return self._known_counts[counts]

    def _do_rows_stay(self, counts: tuple[int, ...]) -> bool:
        total = sum(counts)
        if not total or missing_rows(total, self._replicas):
            return False
        places: Any = self.by_rows.devices_indices_map((total,))
        for device, (rows,) in places.items():
            first, last, _ = rows.indices(total)
            start = sum(counts[: device.process_index])
            if first < start or last > start + counts[device.process_index]:
                return False
        return True

    def _shard_stacked(self, batches: Any) -> Any:
        """Place stacked host batches: dim 0 is the step, and dim 1, the rows, is sharded."""

        def shard(leaf: np.ndarray) -> Any:
            if leaf.ndim < 2 or leaf.shape[1] == 0:
                return self._put(leaf, self.replicated)
            rows = leaf.shape[1]
            padding = np.repeat(leaf[:, -1:], missing_rows(rows, self._replicas), axis=1)
            padded = np.concatenate([leaf, padding], axis=1) if padding.size else leaf
            return PaddedArray(self._put(padded, self._stacked_by_rows), rows)

        return jax.tree.map(self._place_on_one if self._replicas == 1 else shard, batches)

    def _place_eagerly(self, leaf: Any) -> Any:
        if leaf is None:
            return None
        if not isinstance(leaf, jax.Array | sparse.JAXSparse):
            leaf = host_array(leaf)
        even = leaf.ndim > 0 and leaf.shape[0] % self._replicas == 0
        even = even and not isinstance(leaf, sparse.JAXSparse)
        return jax.device_put(leaf, self.by_rows if even else self.replicated)

    # ------------------------------------------------------ inside the compiled step

    def _true_rows(self, batch: Any) -> Any:
        leaves = jax.tree.leaves(batch, is_leaf=is_padded)
        self.is_whole = any(leaf.whole for leaf in leaves if is_padded(leaf))

        def slice_rows(leaf: Any) -> Any:
            if not isinstance(leaf, PaddedArray):
                return leaf
            layout = self.replicated if leaf.whole else self.by_rows
            return jax.lax.with_sharding_constraint(leaf.padded[: leaf.rows], layout)

        return jax.tree.map(slice_rows, batch, is_leaf=is_padded)

    def _split_outputs(self, outputs: Any, batch: Any) -> Any:
        leaves = jax.tree.leaves(batch, is_leaf=is_padded)
        whole = any(leaf.whole for leaf in leaves if is_padded(leaf))

        def pad(leaf: Any) -> Any:
            leaf = jnp.asarray(leaf)  # a model may return Python numbers
            if leaf.ndim == 0 or leaf.shape[0] == 0:
                return leaf
            if whole:
                leaf = jax.lax.with_sharding_constraint(leaf, self.replicated)
            rows = leaf.shape[0]
            padding = [(0, missing_rows(rows, self._replicas))] + [(0, 0)] * (leaf.ndim - 1)
            padded = jnp.pad(leaf, padding)
            return PaddedArray(jax.lax.with_sharding_constraint(padded, self.by_rows), rows)

        return jax.tree.map(pad, outputs)


class CompiledStep:
    """One step of a model as a program, and what is known of it; see `Programs.compiled`.

    Attributes:
        run: The program for one batch, from a state with all groups to one with all.
        stay_split: Whether outputs stay sharded by rows.
    """

    def __init__(
        self,
        steps: Programs,
        step: Program,
        split: Callable[[], frozenset[int]],
        per_row_outputs: bool,
        trains: bool,
        complete: Callable[[], bool],
        options: dict[str, str] | None,
    ) -> None:
        self._programs, self._step, self._split = steps, step, split
        self._trains, self._complete, self._by_rows = trains, complete, per_row_outputs
        # No process could read outputs that are sharded over several processes.
        self.stay_split = per_row_outputs and steps._replicas > 1 and not steps._several
        self._is_whole: dict[object, bool] = {}  # by the shapes of batches
        self._is_worth_it: bool | None = None  # to run several steps as one program
        self._ran_alone = False
        jit = partial(
            jax.jit,
            donate_argnums=0 if trains else (),
            out_shardings=(None if self.stay_split else steps.replicated, None),
            compiler_options=options,
        )
        self._one: Any = jit(self.program)
        self._many: Any = jit(repeated(self.program, every_row if per_row_outputs else last))
        self.run: Program = self._one if trains else _with_state(self._one)
        self._run_many: Program = self._many if trains else _with_state(self._many)

    def program(self, state: State, batch: Any) -> tuple[Any, Any]:
        """Run the step on tracers, and return the outputs and the groups that are returned."""
        after: Any
        outputs, after = self._step(state, self._programs._true_rows(batch))
        # `after` may be larger than `state`: the first step after `compile` builds metrics.
        layouts = self._programs._layouts(after, self._split())
        if self._trains:
            after = tuple(map(_laid_out, after, layouts))
        else:
            positions = changed_groups(state, after)
            after = {n: _laid_out(after[n], layouts[n]) for n in positions}
        return (
            self._programs._split_outputs(outputs, batch) if self.stay_split else outputs
        ), after

    def check(self, program: Program, state: State, batch: Any) -> Any:
        """Check a program before its first batch of a shape; see `StepFunction.check_program`."""
        known = (program is self.run, shapes_of(batch))
        if known not in self._is_whole:
            STATUS_OF_PROCESS.compiles = True
            compiled = self._one if program is self.run else self._many
            traced = compiled.trace(state, batch)
            if self._programs._several:
                program_fingerprint.check_same(traced)
            self._is_whole[known] = self._is_unsplittable(compiled, traced, state, batch)
        return undivided(batch) if self._is_whole[known] else batch

    def is_short(self, state: State, batch: Any) -> bool:
        """Return whether the call of a program of one step matters beside the step itself."""
        # A step computes each trained variable anew: many of them need no trace.
        numbers = sum(math.prod(value.shape) for value in state[0])
        if numbers > MOST_NUMBERS or not self._complete():
            return False
        return is_short(self._one.trace(state, batch))

    def batches_to_pull(self, batch: Any, times: int) -> int:
        """Return the number of batches to draw before the first step runs."""
        can = self._is_worth_it is not False and can_be_stacked(batch)
        return times if can and times <= most_batches(batch) else 1

    def stack(self, state: State, batches: list[Any]) -> tuple[Program, Any] | None:
        """Return one program for several batches, and its argument, if it is worth it."""
        if self._is_worth_it is False or not few_bytes(batches):
            return None
        unknown = self._is_worth_it is None
        if unknown and not (self._ran_alone or self._by_rows or self._complete()):
            self._ran_alone = True  # once: custom metrics may never count as built
            return None
        placed = self._programs._shard_stacked(stacked(batches))
        if unknown:
            platform = self._programs.platform
            self._is_worth_it = is_worth_it(lambda: self._many.trace(state, placed), platform)
        return (self._run_many, placed) if self._is_worth_it else None

    def _is_unsplittable(self, program: Any, traced: Any, state: State, batch: Any) -> bool:
        """Return whether every device needs the whole batch, and warn if so."""
        replicas = self._programs._replicas
        why = why_whole(
            traced.jaxpr.jaxpr,
            {rows for rows, *_ in shapes_of(batch)},
            replicas,
            lambda: program.trace(state, longer(batch, replicas)).jaxpr.jaxpr,
        )
        if why:
            warnings.warn(why, UnsplitBatchWarning, stacklevel=3)
        return bool(why)


def _laid_out(group: Any, layouts: list[NamedSharding]) -> Any:
    pairs = zip(jax.tree.leaves(group), layouts, strict=True)
    return [jax.lax.with_sharding_constraint(leaf, layout) for leaf, layout in pairs]


def _with_state(program: Any) -> Program:
    """Return a program whose state has all groups, from one that returns the changed ones."""

    def run(state: State, batch: Any) -> tuple[Any, State]:
        outputs, changed = program(state, batch)
        return outputs, merged(state, changed)

    return run


def _as_they_are(outputs: Any) -> Any:
    return outputs
