"""Training runs of one model from one start, each compared with the first."""

import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

from lockstep.attach.attachment import attach, detach, session_of
from lockstep.core.engine import Engine, Probe
from lockstep.core.layout import DataParallel
from lockstep.core.state import Values, distance, optimizers_of, restore, rnn_states, snapshot
from lockstep.engines.replicas.sketches import (
    GRADIENT,
    OUTPUT,
    Bounds,
    Sketches,
    first_mismatch,
    norms_of_gradients,
)
from lockstep.errors import UnsplitBatchWarning, counted
from lockstep.keras_compat import computes_in_float64, layers_in, layers_not_in_float64
from lockstep.processes import process_group
from lockstep.tools.batches import Batch, rows_of
from lockstep.tools.progress import progress
from lockstep.tools.verify.float64 import NEXT, compare_in_float64
from lockstep.tools.verify.verification import (
    BOUND,
    DOUBLE_BOUND,
    Difference,
    SameWeights,
    Verification,
    listed,
)
from lockstep.training.probe_helpers import SHORT_FLOATS


def compare(
    engine: Engine,
    model: Any,
    batches: list[Batch],
    layout: DataParallel,
    *,
    from_same_weights: bool = False,
) -> tuple[Verification, SameWeights | None]:
    """Compare training on several devices with training on one; restore the model afterwards.

    The model trains on one device, and on several. Where these differ by more than rounding
    usually does, it trains on one device again, and the same comparison in float64 decides.

    Args:
        engine: The engine of the model's backend.
        model: A compiled Keras model.
        batches: The batches to train on, one for each step, as `fit` hands them over.
        layout: How the model is laid out on the devices that are compared with one.
        from_same_weights: Whether steps in float64 that differ are compared from the same weights.

    Returns:
        The result, and that comparison.
    """
    rows = [rows_of(batch) for batch in batches]
    probe = engine.probe(model)
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder,
        untouched(engine, model, probe, batches[0]) as lowered,
        process_group.values_of_first(model),
        probe.precise() as remarks,
    ):
        comparison = _Comparison(
            engine, model, probe, batches, layout, Path(folder), lowered, remarks
        )
        comparison.from_same_weights = from_same_weights
        comparison.run()
    found = Verification(
        backend=engine.name,
        devices=layout.devices,
        micro_batch_size=layout.micro_batch_size,
        steps=len(comparison.batches),
        rows=(min(rows), max(rows)),
        differences=comparison.differences,
        notes=tuple(comparison.notes),
        first_step=comparison.first_step,
        first_layer=comparison.first_layer,
        cause=comparison.cause,
        rounding=comparison.rounding,
        not_finite_from=comparison.not_finite_from,
        lowered=comparison.lowered,
        zero_gradients=comparison.zero_gradients,
        behind_zero_gradients=comparison.behind_zero_gradients,
    )
    return found, comparison.same_weights


@dataclass
class _Comparison:
    """Runs of one model from one start, each compared with the first.

    Attributes:
        batches: The batches of the steps that are compared: those before the first step
            after which, on one device, the loss or a weight is not finite.
    """

    engine: Engine
    model: Any
    probe: Probe
    batches: list[Batch]
    layout: DataParallel
    folder: Path
    lowered: str | None
    remarks: list[str]
    from_same_weights: bool = False
    same_weights: SameWeights | None = None
    zero_gradients: tuple[str, ...] = ()
    behind_zero_gradients: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    notes: list[str] = field(default_factory=list)
    first_step: int | None = None
    first_layer: str | None = None
    cause: str | None = None
    rounding: float | None = None
    not_finite_from: int | None = None
    was_traced: bool = False

    def __post_init__(self) -> None:
        self.names = self.layout.devices
        self._start = snapshot(self.model)
        self._double = computes_in_float64() and not layers_not_in_float64(self.model)
        self._bound = DOUBLE_BOUND if self._double else BOUND
        self._bounds: list[dict[str, float]] = []
        self._unmoved: list[str] = []

    def run(self) -> None:
        self._alone = self.names[:1] if self._loses_states() else None
        self._place(self._alone)
        if self.lowered == "float32":
            self._bound = BOUND
            self.notes.append(
                "The code of the model casts float64 values to float32, so the float32 bound "
                "applies."
            )
        self._train_first()
        if not self.batches:
            self.cause = self._cause_not_finite()
            return
        self._place(self.names)
        self.differences = self._differences(self._on_several(), note_unsplit=True)
        self.notes += self.remarks
        self.was_traced = bool(self.remarks)
        if _first_step(self.differences) is not None:
            self._explain()
        if self.cause is None:
            self._judge_unmoved()
        if self.not_finite_from is not None:
            if self.cause is None:
                self.cause = self._cause_not_finite()
            else:
                self.notes.append(self._cause_not_finite())

    def _explain(self) -> None:
        """Find the cause of differences beyond the bound, or that they are rounding."""
        self._place(self._alone)
        again = self._differences("one device again")
        if _first_step(again) is not None:
            self.first_step, self.first_layer, _ = self._first_part(again, self._alone)
            self.cause = _unsteady(self.first_layer)
        elif not self._double:
            self._decide_in_float64()
        elif self.lowered not in (None, "float32"):
            self.cause = (
                f"{self._beyond(self.lowered)}. Without the casts to {self.lowered} in the code of "
                "the model, float64 decides."
            )
        else:
            if self.from_same_weights:
                self._compare_from_same_weights()
            self.first_step, self.first_layer, what = self._first_part(self.differences, self.names)
            self.cause = _cause(self.first_layer, what)
            if what is None and self.was_traced:
                self.cause = (
                    "By Keras's code, the layers and gradients of this step agree, but the runs "
                    "differ. A graph of it may be wrong: verify the model without jit_compile=True."
                )

    def _compare_from_same_weights(self) -> None:
        """Compare each step on several devices with that on one, from the weights of one."""
        self._place(self.names)
        steps = self._differences(f"{self._on_several()}, each step by itself", by_itself=True)
        known = self._trained().union(self._owners())
        if known.issuperset(_beyond_bound(steps)):
            self.same_weights = SameWeights(steps, *self._gradients())

    def _gradients(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the largest norm of the gradient of each variable, on one device and on several.

        Each is that of all steps from the weights of one device. Variables that share a path are
        left out, and on JAX those of a model with its own training step.
        """
        known, found = self._trained(), []
        for devices, run in (self._alone, "one device"), (self.names, self._on_several()):
            self._place(devices)
            largest: dict[str, float] = {}
            with closing(
                self.probe.recorded(self._each_by_itself(f"gradients, {run}"), layers=False)
            ) as steps:
                for replicas in steps:
                    for name, size in norms_of_gradients(replicas).items():
                        largest[name] = float(np.maximum(largest.get(name, 0.0), size))
            found.append({name: size for name, size in largest.items() if name in known})
        return found[0], found[1]

    def _each_by_itself(self, run: str) -> Iterator[Batch]:
        """Yield each batch, with the weights of one device before its step in place."""
        run += " in float64" if self._double else ""
        with progress(len(self.batches), lines=True) as advance:
            for step, batch in enumerate(self.batches, 1):
                advance(run, 0)
                restore(self.model, self._before(step))
                yield batch
                advance(run, 1)

    def _trained(self) -> set[str]:
        """Return the paths of trainable variables that no other variable has."""
        paths = Counter(variable.path for variable in self.model.trainable_variables)
        return {path for path, times in paths.items() if times == 1}

    def _owners(self) -> dict[str, str]:
        """Return the trainable variable of each optimizer slot, by their names."""
        flat = {path.replace("/", "_"): path for path in sorted(self._trained())}
        owners = {}
        for owner, optimizer in optimizers_of(self.model):
            for slot in optimizer.variables:
                # keras/src/optimizers/base_optimizer.py, BaseOptimizer.add_variable_from_reference
                start = slot.path.rpartition("/")[2]
                while start and start not in flat:
                    start = start.rpartition("_")[0]
                if start:
                    owners[f"{owner}/{slot.path}"] = flat[start]
        return owners

    def _decide_in_float64(self) -> None:
        """Find out whether differences beyond the bound are rounding."""
        worst = self.differences[0]
        said = (
            f"In the precision of the model, the largest difference is {worst.largest:.1e} "
            f"({worst.name})"
        )
        told = self._in_float64()
        if isinstance(told, str):
            self.cause = f"{self._beyond(self._own_type())}: {told}"
            return
        found, same_weights = told
        self.lowered = found.lowered
        if found.verdict == "cannot tell":
            self.differences = found.differences
            self.cause = f"In float64: {found.cause}"
            return
        if found.verdict == "different":
            zero, behind = self._zero_gradients(found, same_weights)
            if not zero:
                self.differences = found.differences
                self.first_step, self.first_layer = found.first_step, found.first_layer
                self.cause = f"In float64: {found.cause}"
                self.notes.append(f"The listed differences are in float64. {said}.")
                return
            self.zero_gradients, self.behind_zero_gradients = zero, behind
        _, layer, what = self._first_part(self.differences, self.names)
        if what == OUTPUT:
            self.cause = (
                f"{said}. In float64, in another process, they agree. But from the same "
                f"weights, the outputs of {layer!r} differ by more than 0.1, which is not "
                f"rounding: they may depend on this process. {NEXT}"
            )
        else:
            self.rounding = worst.largest

    def _zero_gradients(
        self, found: Verification, same_weights: SameWeights | None
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the variables whose gradient is zero up to rounding, and what differs behind them.

        There are none if something else differs in a step from the same weights.

        Args:
            found: What float64 has found.
            same_weights: Each of its steps from the same weights.
        """
        if same_weights is None:
            return (), ()
        owners = self._owners()
        over_steps = _beyond_bound(found.differences)
        in_a_step = {owners.get(name, name) for name in _beyond_bound(same_weights.steps)}
        moved = in_a_step.union(owners.get(name, name) for name in over_steps)
        small = same_weights.small()
        if not (in_a_step <= small and moved & small):
            return (), ()
        zero = same_weights.zero_beside(*self._gradients())
        if not in_a_step <= zero:
            return (), ()
        behind = (name for name in over_steps if owners.get(name, name) not in zero)
        return tuple(sorted(moved & zero)), tuple(behind)

    def _beyond(self, dtype: str) -> str:
        """Return how far the runs are apart, where this type is the longest that was tried."""
        worst = self.differences[0]
        said = (
            f"A higher precision than {dtype} is not possible: the largest difference is "
            f"{worst.largest:.1e} ({worst.name})"
        )
        self._place(self._alone)
        if self._reads_order():
            return said
        batches = self.batches
        self.batches = [keras.tree.map_structure(_reversed, batch) for batch in batches]
        try:
            again = self._differences("one device, rows reversed")
        finally:
            self.batches = batches
        itself = max(difference.largest for difference in again)
        if itself == 0:
            return said
        return (
            f"{said}, {worst.largest / itself:.1f} times as much as one device differs from "
            "itself if the order of rows changes"
        )

    def _reads_order(self) -> bool:
        """Return whether a step depends on the order of rows, by random numbers or states."""
        drawn = [name for name in self._start if "seed_generator_state" in name]
        after = self._first_run(1)
        moved = any(not np.array_equal(self._start[name], after[name]) for name in drawn)
        return moved or bool(rnn_states(self.model))

    def _own_type(self) -> str:
        """Return the shortest float type that a layer computes in."""
        types = {layer.compute_dtype for layer in layers_in(self.model)}
        return next((each for each in SHORT_FLOATS if each in types), "float32")

    def _judge_unmoved(self) -> None:
        """Say which weights did not move on one device; without any there is no verdict."""
        trained = len({variable.path for variable in self.model.trainable_variables})
        steps = counted(len(self.batches), "step")
        if not trained:
            self.cause = (
                "The model has no trainable weight, so an error in training would not be "
                "visible. Set trainable=True on the layers to compare."
            )
        elif len(self._unmoved) == trained:
            self.cause = (
                f"No weight changed in {steps} on one device, so an error in training would not "
                "be visible. The usual causes: labels out of range, a learning rate of 0, a "
                "loss that does not depend on the weights, gradients that are accumulated over "
                "more steps."
            )
        elif self._unmoved:
            names = listed(self._unmoved)
            self.notes.append(
                f"These weights did not change on one device, so they are not tested: {names}."
            )

    def _in_float64(self) -> tuple[Verification, SameWeights | None] | str:
        if process_group.several():
            return (
                "The float64 comparison does not run under a launcher with several processes. "
                f"{NEXT}"
            )
        self._place(None)
        restore(self.model, self._start)
        return compare_in_float64(compare, self.engine, self.model, self.batches, self.layout)

    # --------------------------------------------------------------------------- runs

    def _on_several(self) -> str:
        size = self.layout.micro_batch_size
        parts = "" if size is None else f", at most {counted(size, 'row')} at once"
        return f"{counted(len(self.names), 'device')}{parts}"

    def _steps(self, run: str, *, by_itself: bool = False) -> Iterator[tuple[int, Values]]:
        """Train from the start, or each step from the weights of one device; yield the values."""
        restore(self.model, self._start)
        run += " in float64" if self._double else ""
        with progress(len(self.batches), lines=True) as advance:
            advance(run, 0)
            for step, batch in enumerate(self.batches, 1):
                if by_itself:
                    restore(self.model, self._before(step))
                logs = self.probe.train(batch, restart=step == 1)
                yield step, {**logs, **snapshot(self.model)}
                advance(run, 1)

    def _differences(
        self, run: str, *, note_unsplit: bool = False, by_itself: bool = False
    ) -> tuple[Difference, ...]:
        """Train as in the first run, and compare each step with it."""
        apart = []
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", UnsplitBatchWarning)
            for step, values in self._steps(run, by_itself=by_itself):
                first = self._first_run(step)
                apart.append({name: distance(mine, first[name]) for name, mine in values.items()})
        for warning in said:
            if not issubclass(warning.category, UnsplitBatchWarning):
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
            elif note_unsplit:
                self.notes.append(" ".join(str(warning.message).split("\n")))
        found = []
        for name in apart[0]:
            far, bounds = ([step[name] for step in steps] for steps in (apart, self._bounds))
            over = [n for n, (d, b) in enumerate(zip(far, bounds, strict=True), 1) if not d <= b]
            largest = float(np.max(far))  # NaN stays NaN
            found.append(Difference(name, largest, bounds[-1], over[0] if over else None))
        return tuple(sorted(found, key=lambda d: (d.first_step is None, -d.largest)))

    def _place(self, devices: tuple[str, ...] | None) -> None:
        """Put the model on these devices, or back to stock Keras."""
        self.model.train_function = None  # else it is made, and maybe compiled, for nobody
        detach(self.model)
        if devices is not None:
            layout = DataParallel(devices, self.layout.state)
            attach(self.engine, self.model, self.layout if devices == self.names else layout)

    def _loses_states(self) -> bool:
        """Return whether stock Keras drops RNN states between batches, and lockstep keeps them."""
        # Stock Keras on JAX drops the states of stateful RNNs after each batch.
        loses = self.engine.name == "jax" and bool(rnn_states(self.model))
        if loses:
            self.notes.append(
                "Stock Keras on JAX drops the states of stateful RNNs after each batch; so the "
                "runs on one device use lockstep, which keeps the states."
            )
        return loses

    def _train_first(self) -> None:
        """Train on one device, until the loss or a weight is not finite."""
        trained = {variable.path: None for variable in self.model.trainable_variables}
        self._unmoved = list(trained)
        bounds: dict[str, float] = {}
        for step, values in self._steps("one device"):
            _write(self._file(step), values)
            found = [values[name] for name in ("loss", *trained) if name in values]
            if not all(np.all(np.isfinite(value)) for value in found):
                self.not_finite_from = step
                self.batches = self.batches[: step - 1]
                return
            # Rounding is relative to the largest value so far.
            for name, value in values.items():
                size = np.max(np.abs(value), initial=1.0, where=np.isfinite(value))
                bounds[name] = max(bounds.get(name, 0.0), self._bound * float(size))
            self._bounds.append(dict(bounds))
            self._unmoved = [
                name for name in self._unmoved if np.array_equal(values[name], self._start[name])
            ]

    def _cause_not_finite(self) -> str:
        step, before = self.not_finite_from, len(self.batches)
        agree = f"Steps 1 to {before} were compared; " if before else ""
        return (
            f"On one device the loss or a weight is not finite from step {step} on. "
            f"{agree}Later steps cannot be compared, because NaN equals NaN. Lower the learning "
            "rate, or fix the data."
        )

    def _file(self, step: int) -> Path:
        return self.folder / f"{step}.npz"

    def _first_run(self, step: int) -> Values:
        return _read(self._file(step))

    def _before(self, step: int) -> Values:
        """Return the values of the first run before a step."""
        return self._start if step == 1 else self._first_run(step - 1)

    # --------------------------------------------------------------------------- cause

    def _first_part(
        self, differences: tuple[Difference, ...], devices: tuple[str, ...] | None
    ) -> tuple[int, str | None, str | None]:
        """Return the first step and layer that differ on these devices, and what of the layer."""
        step = _first_step(differences)
        assert step is not None

        batch = self.batches[step - 1]

        def recorded(devices: tuple[str, ...] | None) -> list[Sketches]:
            self._place(devices)
            restore(self.model, self._before(step))
            [replicas] = self.probe.recorded([batch])
            return [_of_layers(each) for each in replicas]

        within = 10 * self._bound
        bounds = Bounds(within, 10 * within, within)
        if devices == self.names and not self._double:
            bounds = Bounds(0.1, 0.1, 0.1)
        one = recorded(self._alone)[0]
        found = first_mismatch(one, recorded(devices), rows_of(batch), bounds)
        return (step, None, None) if found is None else (step, found.name, found.kind)


def _reversed(rows: Any) -> Any:
    return rows[::-1]


def _first_step(differences: tuple[Difference, ...]) -> int | None:
    return min((d.first_step for d in differences if d.first_step is not None), default=None)


def _beyond_bound(differences: tuple[Difference, ...]) -> list[str]:
    return [each.name for each in differences if each.first_step is not None]


def _unsteady(layer: str | None) -> str:
    return (
        "The model is not deterministic: two runs on one device from the same start differ as "
        f"well. {_where(layer)}It may draw random numbers, or keep state, in Python when it is "
        "traced: keep them in a keras.random.SeedGenerator or a keras.Variable."
    )


def _cause(layer: str | None, what: str | None) -> str:
    if what == OUTPUT:
        return (
            f"{_where(layer)}From the same weights and inputs, it gives a different result on "
            "several devices. It may read the number of devices, or state that is kept on a "
            "device."
        )
    if what == GRADIENT:
        return (
            f"The forward pass is the same; the gradient of {layer} is the first that differs. "
            "A possible cause is a custom gradient that depends on the devices."
        )
    return (
        "From the same weights, this single step agrees; but over the previous steps, the runs "
        "differ by more than 1e-10. A part of the model may compute in float32 whatever the "
        "dtype of its inputs. With --float64, gradients that are zero up to rounding have the "
        "same effect: remove the option."
    )


def _where(layer: str | None) -> str:
    return f"The first layer that differs is {layer!r}. " if layer else ""


def _of_layers(seen: Sketches) -> Sketches:
    """Return what layers and gradients have computed, without logs and states."""
    return {name: value for name, value in seen.items() if name.startswith((OUTPUT, GRADIENT))}


@contextmanager
def untouched(engine: Engine, model: Any, probe: Probe, batch: Batch) -> Iterator[str | None]:
    """Build the model as `fit` does, and restore its values and devices afterwards.

    Yields:
        What `Probe.build` returns.
    """
    before = session_of(model)
    detach(model)
    function = model.train_function
    start: Values = {}
    try:
        lowered = probe.build(batch)
        start = snapshot(model)
        yield lowered
    finally:
        model.train_function = None
        detach(model)
        if start:
            restore(model, start)
            model.reset_metrics()
        model.train_function = function
        if before is not None:
            attach(engine, model, before.layout)


def _write(file: Path, values: Values) -> None:
    arrays: dict[str, Any] = {f"a{n}": value for n, value in enumerate(values.values())}
    np.savez(file, names=np.array(list(values)), **arrays)


def _read(file: Path) -> Values:
    with np.load(file) as arrays:
        return {str(name): arrays[f"a{n}"] for n, name in enumerate(arrays["names"])}
