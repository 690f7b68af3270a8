"""Training runs of one model from one start, each compared with the first."""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

from lockstep.batches import Batch, rows_of
from lockstep.devices import REPLICATED
from lockstep.engines.attachment import attach, detach, session_of
from lockstep.engines.engine import Engine, Probe
from lockstep.engines.probe_helpers import SHORT_FLOATS
from lockstep.errors import UnsplitBatchWarning, counted
from lockstep.keras_compat import computes_in_float64, layers_in, layers_not_in_float64
from lockstep.layout import DataParallel
from lockstep.processes import process_group
from lockstep.progress import progress
from lockstep.state import Values, distance, restore, rnn_states, snapshot
from lockstep.verify.float64 import NEXT, compare_in_float64
from lockstep.verify.verification import BOUND, DOUBLE_BOUND, Difference, Verification


def compare(
    engine: Engine,
    model: Any,
    batches: list[Batch],
    names: tuple[str, ...],
    state: str = REPLICATED,
) -> Verification:
    """Compare training on several devices with training on one; restore the model afterwards.

    The model trains on one device twice, and on several. Where these differ from one by more
    than rounding usually does, the same comparison in float64 decides.

    Args:
        engine: The engine of the model's backend.
        model: A compiled Keras model.
        batches: The batches to train on, one for each step, as `fit` hands them over.
        names: The devices to compare with one, at least 2.
        state: How the variables are laid out on them.
    """
    rows = [rows_of(batch) for batch in batches]
    probe = engine.probe(model)
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder,
        _untouched(engine, model, probe, batches[0]) as lowered,
        process_group.values_of_first(model),
        probe.precise(),
    ):
        comparison = _Comparison(engine, model, probe, batches, names, state, Path(folder), lowered)
        comparison.run()
    return Verification(
        backend=engine.name,
        devices=names,
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
    )


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
    names: tuple[str, ...]
    state: str
    folder: Path
    lowered: str | None
    differences: tuple[Difference, ...] = ()
    notes: list[str] = field(default_factory=list)
    first_step: int | None = None
    first_layer: str | None = None
    cause: str | None = None
    rounding: float | None = None
    not_finite_from: int | None = None

    def __post_init__(self) -> None:
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
                "The code of the model casts values of float64 to float32: the bound is that "
                "of float32."
            )
        self._train_first()
        if not self.batches:
            self.cause = self._cause_not_finite()
            return
        again = self._differences("one device again")
        self._place(self.names)
        self.differences = self._differences(f"{len(self.names)} devices", note_unsplit=True)
        if _first_step(again) is not None:
            self._find_first(again, self._alone)
            self.cause = _unsteady(self.first_layer)
        elif _first_step(self.differences) is not None:
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
        if self._double and self.lowered not in (None, "float32"):
            self.cause = (
                f"{self._beyond(self.lowered)}. Without the casts to {self.lowered} in the code of "
                "the model, float64 decides."
            )
            return
        what = self._find_first(self.differences, self.names)
        if self._double:
            self.cause = _cause(self.first_layer, what)
        else:
            self._decide_in_float64(what)

    def _decide_in_float64(self, what: str | None) -> None:
        """Find out whether differences beyond the bound are rounding."""
        worst = self.differences[0]
        said = f"In their own precision they are up to {worst.largest:.1e} apart ({worst.name})"
        unlike = self.first_layer if what == "activation" else None
        self.first_step = self.first_layer = None
        found = self._in_float64()
        if isinstance(found, str):
            self.cause = f"{self._beyond(self._own_type())}: {found}"
        elif found.verdict == "cannot tell":
            self.differences, self.lowered = found.differences, found.lowered
            self.cause = f"In float64: {found.cause}"
        elif found.cause is not None:
            self.differences, self.lowered = found.differences, found.lowered
            self.first_step, self.first_layer = found.first_step, found.first_layer
            self.cause = f"In float64: {found.cause}"
            self.notes.append(f"The differences are those in float64. {said}.")
        elif unlike is not None:
            self.cause = (
                f"{said}, and in float64, in another process, they agree. But from the same "
                f"weights the outputs of {unlike!r} are more than a tenth apart, which is no "
                f"rounding: they may depend on this process. {NEXT}"
            )
        else:
            self.rounding, self.lowered = worst.largest, found.lowered

    def _beyond(self, dtype: str) -> str:
        """Return how far the runs are apart, where this type is the longest that was tried."""
        worst = self.differences[0]
        said = f"Beyond {dtype} it cannot: at most {worst.largest:.1e} apart ({worst.name})"
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
            f"{said}, which is {worst.largest / itself:.1f} times what one device differs from "
            "itself by another order of rows"
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
                "The model has no trainable weight, so a fault in training would not show. "
                "Set trainable=True on the layers to compare."
            )
        elif len(self._unmoved) == trained:
            self.cause = (
                f"No weight moved in {steps} on one device, so a fault in training would not show. "
                "The usual causes: labels out of range, a learning rate of 0, a loss that does not "
                "depend on the weights, gradients that are accumulated over more steps."
            )
        elif self._unmoved:
            more = len(self._unmoved) - 3
            names = ", ".join(self._unmoved[:3]) + (f" and {more} more" if more > 0 else "")
            self.notes.append(f"Not trained, as on one device they did not move: {names}.")

    def _in_float64(self) -> Verification | str:
        if process_group.several():
            return f"float64 runs where no launcher has started several processes. {NEXT}"
        self._place(None)
        restore(self.model, self._start)
        return compare_in_float64(self.engine, self.model, self.batches, self.names, self.state)

    # --------------------------------------------------------------------------- runs

    def _steps(self, run: str) -> Iterator[tuple[int, Values]]:
        """Train from the start; the values after each step."""
        restore(self.model, self._start)
        run += " in float64" if self._double else ""
        with progress(len(self.batches)) as advance:
            advance(run, 0)
            for step, batch in enumerate(self.batches, 1):
                logs = self.probe.train(batch, restart=step == 1)
                yield step, {**logs, **snapshot(self.model)}
                advance(run, 1)

    def _differences(self, run: str, *, note_unsplit: bool = False) -> tuple[Difference, ...]:
        """Train as in the first run, and compare each step with it."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", UnsplitBatchWarning)
            apart = [
                {name: distance(mine, self._first_run(step)[name]) for name, mine in values.items()}
                for step, values in self._steps(run)
            ]
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
        detach(self.model)
        if devices is not None:
            attach(self.engine, self.model, DataParallel(devices, self.state))

    def _loses_states(self) -> bool:
        """Return whether stock Keras drops RNN states between batches, and lockstep keeps them."""
        loses = self.engine.keras_drops_states and bool(rnn_states(self.model))
        if loses:
            self.notes.append(
                "Stock Keras on JAX drops the states of stateful RNNs after each batch; the runs "
                "on one device are lockstep's on one, which carry them."
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
            f"On one device the loss or a weight is not finite from step {step} on. {agree}"
            "later steps say nothing, because NaN equals NaN. Lower the learning rate, or "
            "mend the data."
        )

    def _file(self, step: int) -> Path:
        return self.folder / f"{step}.npz"

    def _first_run(self, step: int) -> Values:
        return _read(self._file(step))

    # --------------------------------------------------------------------------- cause

    def _find_first(
        self, differences: tuple[Difference, ...], devices: tuple[str, ...] | None
    ) -> str | None:
        """Name the first step and layer that differ on these devices; what of the layer it is."""
        self.first_step = step = _first_step(differences)
        assert step is not None
        start = self._start if step == 1 else self._first_run(step - 1)

        def inspect(devices: tuple[str, ...] | None) -> tuple[Values, Values]:
            self._place(devices)
            restore(self.model, start)
            return self.probe.inspect(self.batches[step - 1])

        several = devices == self.names and not self._double
        self.first_layer, what = _first_apart(
            inspect(self._alone), inspect(devices), within=0.1 if several else 10 * self._bound
        )
        return what


def _reversed(rows: Any) -> Any:
    return rows[::-1]


def _first_step(differences: tuple[Difference, ...]) -> int | None:
    return min((d.first_step for d in differences if d.first_step is not None), default=None)


def _unsteady(layer: str | None) -> str:
    return (
        "The model is not deterministic: two runs on one device from the same start differ as "
        f"well. {_where(layer)}It may draw random numbers, or keep state, in Python when it is "
        "traced: keep them in a keras.random.SeedGenerator or a keras.Variable."
    )


def _cause(layer: str | None, what: str | None) -> str:
    if what == "activation":
        return (
            f"{_where(layer)}From the same weights and inputs it gives something else on "
            "several devices. It may read the number of devices, or state that a device keeps."
        )
    if what == "gradient":
        return (
            f"The forward pass is the same; the gradient of {layer} is the first that differs. "
            "A custom gradient that reads the devices does that."
        )
    return (
        "From the same weights, this step alone agrees; over the steps before, the runs part "
        "by more than 1e-10. A part of the model may compute in float32 whatever it is given."
    )


def _where(layer: str | None) -> str:
    return f"The first layer that differs is {layer!r}. " if layer else ""


def _first_apart(
    one: tuple[Values, Values], other: tuple[Values, Values], within: float
) -> tuple[str | None, str | None]:
    """Return the first layer, or else gradient, that differs by more than rounding."""
    for what, mine, theirs in zip(("activation", "gradient"), one, other, strict=True):
        for name, value in mine.items():
            scale = max(1.0, float(np.max(np.abs(value), initial=0.0)))
            if name not in theirs or not distance(value, theirs[name]) <= within * scale:
                return (name.partition("/")[2] if what == "activation" else name), what
    return None, None


@contextmanager
def _untouched(engine: Engine, model: Any, probe: Probe, batch: Batch) -> Iterator[str | None]:
    """Build the model as `fit` does, and restore its values and devices afterwards.

    Yields:
        What `Probe.build` returns.
    """
    before = session_of(model)
    detach(model)
    start: Values = {}
    try:
        lowered = probe.build(batch)
        start = snapshot(model)
        yield lowered
    finally:
        detach(model)
        if start:
            restore(model, start)
            model.reset_metrics()
        if before is not None:
            attach(engine, model, before.layout)


def _write(file: Path, values: Values) -> None:
    arrays: dict[str, Any] = {f"a{n}": value for n, value in enumerate(values.values())}
    np.savez(file, names=np.array(list(values)), **arrays)


def _read(file: Path) -> Values:
    with np.load(file) as arrays:
        return {str(name): arrays[f"a{n}"] for n, name in enumerate(arrays["names"])}
