"""Keras's JAX steps over a mesh.

A step sees the global batch. The host batch is padded to a multiple of the number
of devices by repeating its last row, and sharded; inside the compiled step the
padding is sliced off again under a sharding constraint, for which JAX allows uneven
shards. So the partitioner handles the uneven split, the mathematics is that of one
device, and the padding never reaches the model.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import sparse
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep.engines.jax import flags
from lockstep.engines.jax.on_devices.arrays import host_array, is_native
from lockstep.engines.jax.on_devices.resident import Chosen
from lockstep.engines.jax.on_devices.sharded import (
    Shapes,
    Sharded,
    is_sharded,
    laid_out,
    longer,
    shapes_of,
    undivided,
    whole_rows,
)
from lockstep.engines.jax.several import processes, programs
from lockstep.engines.jax.several.agreement import Seen
from lockstep.engines.jax.steps.ahead import looks_ahead
from lockstep.engines.jax.steps.pace import Pace
from lockstep.engines.jax.steps.reading import Reading, changed
from lockstep.engines.jax.steps.scan import (
    AUTO,
    can_be_stacked,
    every_row,
    few_bytes,
    is_worth_it,
    last,
    most_batches,
    repeated,
    stacked,
)
from lockstep.engines.jax.steps.step import Program, State, Step, StepFunction
from lockstep.engines.jax.unsplit import merging_layers, pooling_whole, why_whole
from lockstep.errors import UnsplitBatchWarning, UnsupportedModel
from lockstep.shards import missing_rows


class Steps:
    """Turns Keras's steps into step functions over one mesh.

    Attributes:
        replicated: The layout of variables: a copy on every device.
        by_rows: The layout of data: split by the first dim.
        devices: The devices, in order.
        platform: What they are: `"cpu"`, `"gpu"`.
    """

    def __init__(self, devices: list[jax.Device]) -> None:
        self.devices = devices
        self.platform: str = devices[0].platform
        self._replicas = len(devices)
        self._ahead = looks_ahead(devices)
        mesh = Mesh(np.array(devices), ("batch",))
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.by_rows = NamedSharding(mesh, PartitionSpec("batch"))
        self._several = processes.several()
        # Over gloo, with several devices in each of several processes (that is, rehearsed ones),
        # some thirty steps under way wait for one another for ever: JAX 0.10.2.
        here = len(mesh.local_devices)
        self._one_at_a_time = self._several and self.platform == "cpu" and here > 1
        self._put = processes.put if self._several else laid_out
        self._stacked_by_rows = NamedSharding(mesh, PartitionSpec(None, "batch"))

    def divides(self, rows: int) -> bool:
        """Whether an array of so many rows can be laid out by rows, and that means a thing."""
        return self._replicas > 1 and not self._several and missing_rows(rows, self._replicas) == 0

    # ------------------------------------------------------------ step functions

    def compiled(
        self,
        step: Step,
        split: Callable[[], frozenset[int]],
        *,
        times: int | str,
        per_row_outputs: bool,
        gradient_bytes: int | None = None,
        complete: Callable[[], bool] = lambda: True,
    ) -> StepFunction:
        """A compiled step function.

        Args:
            step: Keras's `train_step` or `test_step`, or a predicting step.
            split: Says which of the non-trainable variables, by position, are split
                by rows. All other variables are on every device.
            times: `steps_per_execution`: a number, or `"auto"`.
            per_row_outputs: Whether outputs stay split by rows, as predictions do,
                or go to every device, as the few numbers of a log do.
            gradient_bytes: Of the gradients that the step sums over the devices, `None` where
                it trains nothing.
            complete: Says whether every metric is there; a step that makes some runs alone.
        """

        def program(state: State, batch: Any) -> tuple[Any, Any]:
            after: Any
            outputs, after = step(state, self._true_rows(batch))
            # Which may be larger: a first step builds the metrics of a model compiled anew.
            layouts = self._layouts(after, split())
            if trains:
                after = tuple(map(_laid_out, after, layouts))
            else:
                after = {n: _laid_out(after[n], layouts[n]) for n in changed(state, after)}
            return (self._split_outputs(outputs, batch) if stay_split else outputs), after

        trains = gradient_bytes is not None
        # What stays split over several processes, none of them could read.
        stay_split = per_row_outputs and self._replicas > 1 and not self._several
        whole: dict[object, bool] = {}  # by the shapes of batches
        outputs_layout = None if stay_split else self.replicated
        jit = partial(
            jax.jit,
            donate_argnums=0 if trains else (),
            compiler_options=flags.options(self.devices, gradient_bytes or 0),
            out_shardings=(outputs_layout, None),
        )
        run: Any = jit(program)
        many: Any = jit(repeated(program, every_row if per_row_outputs else last))
        if not trains:
            run, many = Reading(run), Reading(many)
        stacks = not (per_row_outputs and self._several)
        worth_it: list[bool] = []
        alone: list[bool] = []
        open_times = times == AUTO and not self._several
        pace = Pace() if open_times else None

        def look(program: Any, state: State, batch: Any) -> Any:
            shapes = shapes_of(batch)
            known = (program is run, shapes)
            if known not in whole:
                traced = program.trace(state, batch)
                if self._several:
                    programs.check_same(traced)
                whole[known] = self._is_unsplittable(program, traced, state, batch)
                if not whole[known]:
                    self._say_if_unsplit(traced, shapes)
            return undivided(batch) if whole[known] else batch

        def at_once(batch: Any, times: int) -> int:
            can = worth_it != [False] and can_be_stacked(batch)
            return times if can and times <= most_batches(batch) else 1

        def together(state: State, batches: list[Any]) -> tuple[Program, Any] | None:
            if worth_it == [False] or not few_bytes(batches):
                return None
            if not (worth_it or alone or per_row_outputs or complete()):
                alone.append(True)  # once: metrics of a class's own may count as unbuilt for ever
                return None
            placed = self._shard_stacked(stacked(batches))
            if not worth_it:
                platform = self.platform
                worth_it.append(is_worth_it(lambda: many.trace(state, placed), platform))
                if pace is not None and not worth_it[0]:
                    pace.refuse()
            return (many, placed) if worth_it[0] else None

        return StepFunction(
            place=self._shard,
            settle=lambda state: self.settled(state, split()),
            run=run,
            finish=(whole_rows if stay_split else _as_they_are) if per_row_outputs else None,
            times=1 if isinstance(times, str) else times,
            look=look if self._replicas > 1 else None,
            at_once=at_once if stacks else None,
            together=together if stacks else None,
            seen=Seen(every_pull=True) if self._several else None,
            here=partial(jax.tree.map, processes.local) if self._several else None,
            pace=pace,
            one_at_a_time=self._one_at_a_time,
            ahead=self._ahead,
            takes_arrays=self._replicas == 1 and not self._ahead,
        )

    def eager(
        self,
        step: Step,
        split: Callable[[], frozenset[int]],
        *,
        times: int | str,
        per_row_outputs: bool,
    ) -> StepFunction:
        """A step function that runs operation by operation, as `run_eagerly` asks.

        Outside a program JAX splits even shards only: a batch that does not divide
        goes whole to every device, which is exact and repeats the work.
        """

        def run(state: State, batch: Any) -> tuple[Any, State]:
            with pooling_whole(self.replicated):
                return step(self.settled(state, split()), batch)

        return StepFunction(
            place=lambda batch: keras.tree.map_structure(self._place_eagerly, batch),
            settle=lambda state: state,
            run=run,
            finish=_as_they_are if per_row_outputs else None,
            times=1 if isinstance(times, str) else times,
        )

    # ------------------------------------------------------------------ placement

    def settled(self, state: State, split: frozenset[int] = frozenset()) -> State:
        """The same state, every array in its layout and none of them in it twice.

        An array that a callback assigned sits on one device, and would cost a
        compilation; one that two variables share cannot be donated.
        """
        seen: set[int] = set()

        def settle(value: Any, layout: NamedSharding) -> Any:
            if id(value) in seen:
                value = jnp.copy(value)
            seen.add(id(value))
            if getattr(value, "sharding", None) == layout:
                return value
            return self.moved(value, layout)

        layouts = self._layouts(state, split)
        return tuple([*map(settle, *pair)] for pair in zip(state, layouts, strict=True))

    def moved(self, value: Any, layout: NamedSharding) -> Any:
        """The array in another layout, and in memory that nobody else writes into.

        On CPUs JAX may have taken over that of an array of NumPy's which was assigned.
        """
        own = np.array(processes.local(value)) if self.platform == "cpu" else value
        return self._put(own, layout)

    def _layouts(self, state: State, split: frozenset[int]) -> list[list[NamedSharding]]:
        layouts = [[self.replicated] * len(group) for group in state]
        for position in split:
            layouts[1][position] = self.by_rows
        return layouts

    def on_mesh(self, value: Any) -> Any:
        """The same value, copied to every device where it sits on others.

        Anything but a concrete JAX array committed to devices of its own is left
        to JAX, which moves it by itself.
        """
        if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
            return value
        if self._several:  # the variables of a direct call are in this process alone
            return processes.local(value)
        if not value.committed or value.sharding.device_set == self.replicated.device_set:
            return value
        return jax.device_put(value, self.replicated)

    def _shard(self, batch: Any) -> Any:
        if isinstance(batch, Chosen):
            return batch.placed()
        if self._replicas == 1:
            leaves = batch if type(batch) is tuple else (batch,)
            if not self._ahead and all(map(is_native, leaves)):
                return batch
            return keras.tree.map_structure(self._place_on_one, batch)
        return keras.tree.map_structure(self._shard_leaf, batch)

    def _place_on_one(self, leaf: Any) -> Any:
        if leaf is None or (is_native(leaf) and not self._ahead):
            return leaf
        placed = isinstance(leaf, jax.Array | sparse.JAXSparse)
        return jax.device_put(leaf if placed else host_array(leaf), self.replicated)

    def _shard_leaf(self, leaf: Any) -> Any:
        if leaf is None:
            return None
        if isinstance(leaf, sparse.JAXSparse):
            if self._several:
                raise UnsupportedModel(
                    "Sparse inputs were given, and JAX runs in several processes, over which "
                    "sparse arrays\ncannot be laid out. Hand over dense arrays."
                )
            return jax.device_put(leaf, self.replicated)
        if not isinstance(leaf, jax.Array):
            leaf = host_array(leaf)
        if leaf.ndim == 0 or leaf.shape[0] == 0:
            return self._put(leaf, self.replicated)
        rows = leaf.shape[0]
        missing = missing_rows(rows, self._replicas)
        if missing:
            numpy = jnp if isinstance(leaf, jax.Array) else np
            leaf = numpy.concatenate([leaf, numpy.repeat(leaf[-1:], missing, axis=0)])
        return Sharded(self._put(leaf, self.by_rows), rows)

    def _shard_stacked(self, batches: Any) -> Any:
        """Host batches with the step as the first dim, split by rows, which are the second."""

        def shard(leaf: np.ndarray) -> Any:
            if leaf.ndim < 2 or leaf.shape[1] == 0:
                return self._put(leaf, self.replicated)
            rows = leaf.shape[1]
            padding = np.repeat(leaf[:, -1:], missing_rows(rows, self._replicas), axis=1)
            padded = np.concatenate([leaf, padding], axis=1) if padding.size else leaf
            return Sharded(self._put(padded, self._stacked_by_rows), rows)

        if isinstance(batches, Chosen):
            return batches.placed()
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
        def slice_rows(leaf: Any) -> Any:
            if not isinstance(leaf, Sharded):
                return leaf
            layout = self.replicated if leaf.whole else self.by_rows
            return jax.lax.with_sharding_constraint(leaf.padded[: leaf.rows], layout)

        return jax.tree.map(slice_rows, batch, is_leaf=is_sharded)

    def _split_outputs(self, outputs: Any, batch: Any) -> Any:
        leaves = jax.tree.leaves(batch, is_leaf=is_sharded)
        whole = any(leaf.whole for leaf in leaves if is_sharded(leaf))

        def pad(leaf: Any) -> Any:
            leaf = jnp.asarray(leaf)  # a model may give numbers of Python's
            if leaf.ndim == 0 or leaf.shape[0] == 0:
                return leaf
            if whole:
                leaf = jax.lax.with_sharding_constraint(leaf, self.replicated)
            rows = leaf.shape[0]
            padding = [(0, missing_rows(rows, self._replicas))] + [(0, 0)] * (leaf.ndim - 1)
            padded = jnp.pad(leaf, padding)
            return Sharded(jax.lax.with_sharding_constraint(padded, self.by_rows), rows)

        return jax.tree.map(pad, outputs)

    # --------------------------------------------------------------- unsplit batches

    def _is_unsplittable(self, program: Any, traced: Any, state: State, batch: Any) -> bool:
        """Whether every device has to have the whole batch, which is said."""
        why = why_whole(
            traced.jaxpr.jaxpr,
            {rows for rows, *_ in shapes_of(batch)},
            self._replicas,
            lambda: program.trace(state, longer(batch, self._replicas)).jaxpr.jaxpr,
        )
        if why:
            warnings.warn(why, UnsplitBatchWarning, stacklevel=3)
        return bool(why)

    def _say_if_unsplit(self, traced: Any, shapes: Shapes) -> None:
        ragged = {rows for rows, *_ in shapes if missing_rows(rows, self._replicas)}
        if not ragged:
            return
        # What is compiled here is what runs: JAX keeps it.
        program = traced.lower().compile().as_text() or ""
        layers = merging_layers(traced.jaxpr.jaxpr, program, ragged)
        if not layers:
            return
        rows = max(ragged)
        warnings.warn(
            f"A batch of {rows} rows over {self._replicas} devices is exact, but not fully split: "
            f"{', '.join(layers)}: the batch is merged with another dim, and devices repeat work.\n"
            f"A batch of {rows + missing_rows(rows, self._replicas)} rows would be split.",
            UnsplitBatchWarning,
            stacklevel=3,
        )


def _laid_out(group: Any, layouts: list[NamedSharding]) -> Any:
    pairs = zip(jax.tree.leaves(group), layouts, strict=True)
    return [jax.lax.with_sharding_constraint(leaf, layout) for leaf, layout in pairs]


def _as_they_are(outputs: Any) -> Any:
    return outputs
