"""Training runs of one model from one start, each compared with the first."""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.batches import Batch, rolled, rows_of, turned_round
from lockstep.engines.engine import Engine
from lockstep.errors import UnsplitBatchWarning
from lockstep.state import Values, distance, restore, rnn_states, snapshot
from lockstep.verify.progress_line import progress_line
from lockstep.verify.rounding import DOUBLE, bound_of, moved_by_last_bit, significand_bits
from lockstep.verify.verification import BOUND, Difference, Verification


def compare(
    engine: Engine,
    model: Any,
    batches: list[Batch],
    names: tuple[str, ...],
    rows: tuple[int, int],
) -> Verification:
    """Compare training on several devices with training on one; restore the model afterwards.

    The model trains on one device twice, on one device with other rounding, and on several.

    Args:
        engine: The engine of the model's backend.
        model: A compiled Keras model.
        batches: The batches to train on, one for each step, as `fit` hands them over.
        names: The devices to compare with one, at least 2.
        rows: The smallest and largest number of rows of a batch.
    """
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder,
        _untouched(engine, model, batches[0]),
        engine.probe(model).synchronized(),
    ):
        comparison = _Comparison(engine, model, batches, Path(folder))
        comparison.run(names)
    return Verification(
        backend=engine.name,
        devices=names,
        steps=len(comparison.batches),
        rows=rows,
        control=comparison.control,
        differences=comparison.differences(),
        notes=tuple(comparison.notes),
        first_step=comparison.first_step,
        first_layer=comparison.first_layer,
        cause=comparison.cause,
        not_finite_from=comparison.not_finite_from,
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
    batches: list[Batch]
    folder: Path
    control: str = ""
    notes: list[str] = field(default_factory=list)
    first_step: int | None = None
    first_layer: str | None = None
    cause: str | None = None
    not_finite_from: int | None = None

    def __post_init__(self) -> None:
        self._probe = self.engine.probe(self.model)
        self._start = snapshot(self.model)
        self._bits = significand_bits(self.model)
        self._bound = bound_of(self._bits)
        self._rounding: list[dict[str, float]] = []
        self._apart: list[dict[str, float]] = []

    def run(self, names: tuple[str, ...]) -> None:
        with self._probe.precise():
            self._alone = names[:1] if self._loses_states() else None
            self._place(self._alone)
            self._train_first()
            if not self.batches:
                self.control = "nothing, because no step is compared"
                self.cause = self._cause_not_finite()
                return
            again = self._distances("one device again", self.batches)
            unsteady = [
                n for n, step in enumerate(again, 1) if not max(step.values()) <= self._bound
            ]
            if unsteady:
                self.control = "nothing, because two runs on one device differ"
                self._rounding = [dict.fromkeys(step, 0.0) for step in again]
            elif self._bits == DOUBLE:
                self.control = "nothing, because float64 needs no control"
                self._rounding = [self._sizes(n) for n in range(1, len(self.batches) + 1)]
            else:
                self._rounding = self._measure_rounding()
            self._place(names)
            self._apart = self._distances(f"{len(names)} devices", self.batches, note_unsplit=True)
            self.notes += self._probe.notes()
            apart = any(d.first_step is not None for d in self.differences())
            if apart and not unsteady and self._bits != DOUBLE:
                self._measure_rounding_again()
            self._find_first(unsteady, names)
            if self.cause is None and self._cannot_tell():
                self.cause = _CANNOT_TELL
            if self.not_finite_from is not None:
                if self.cause is None:
                    self.cause = self._cause_not_finite()
                else:
                    self.notes.append(self._cause_not_finite())

    def differences(self) -> tuple[Difference, ...]:
        found = []
        for name in self._apart[0] if self._apart else ():
            bounds = self._bounds(name)
            apart = [step[name] for step in self._apart]
            over = [n for n, (d, b) in enumerate(zip(apart, bounds, strict=True), 1) if not d <= b]
            largest = float(np.max(apart))  # NaN stays NaN
            found.append(Difference(name, largest, float(bounds[-1]), over[0] if over else None))
        return tuple(sorted(found, key=lambda d: (d.first_step is None, -d.largest)))

    # --------------------------------------------------------------------------- runs

    def _steps(
        self, run: str, batches: list[Batch], start: Values | None = None
    ) -> Iterator[tuple[int, Values]]:
        """Train from the start; the values after each step."""
        restore(self.model, start or self._start)
        self._probe.restart()
        with progress_line(run, len(batches)) as advance:
            for step, batch in enumerate(batches, 1):
                yield step, {**self._probe.train(batch), **snapshot(self.model)}
                advance()

    def _distances(
        self,
        run: str,
        batches: list[Batch],
        start: Values | None = None,
        *,
        note_unsplit: bool = False,
    ) -> list[dict[str, float]]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", UnsplitBatchWarning)
            found = [
                {
                    name: distance(self._unmoved(name, mine, start), self._first_run(step)[name])
                    for name, mine in values.items()
                }
                for step, values in self._steps(run, batches, start)
            ]
        for warning in said:
            if not issubclass(warning.category, UnsplitBatchWarning):
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
            elif note_unsplit:
                self.notes.append(" ".join(str(warning.message).split("\n")))
        return found

    def _unmoved(self, name: str, value: np.ndarray, start: Values | None) -> np.ndarray:
        """Return a value of a run from another start, minus the difference of the starts."""
        if start is None or name not in start or value.dtype.kind != "f":
            return value
        unmoved: np.ndarray = value - (start[name] - self._start[name])
        return unmoved

    def _place(self, devices: tuple[str, ...] | None) -> None:
        """Put the model on these devices, or back to stock Keras."""
        self.engine.detach(self.model)
        if devices is not None:
            self.engine.attach(self.model, devices)

    def _loses_states(self) -> bool:
        """Return whether stock Keras drops RNN states between batches, and lockstep keeps them."""
        loses = self.engine.name == "jax" and bool(rnn_states(self.model))
        if loses:
            self.notes.append(
                "Stock Keras on JAX drops the states of stateful RNNs after each batch; the runs "
                "on one device are lockstep's on one, which carry them."
            )
        return loses

    def _train_first(self) -> None:
        """Train on one device, until the loss or a weight is not finite."""
        trained = {variable.path for variable in self.model.trainable_variables}
        for step, values in self._steps("one device", self.batches):
            _write(self._file(step), values)
            found = [values[name] for name in ("loss", *trained) if name in values]
            if not all(np.all(np.isfinite(value)) for value in found):
                self.not_finite_from = step
                self.batches = self.batches[: step - 1]
                return

    def _cause_not_finite(self) -> str:
        step, before = self.not_finite_from, len(self.batches)
        agree = f"Steps 1 to {before} were compared; " if before else ""
        return (
            f"On one device the loss or a weight is not finite from step {step} on. {agree}"
            "later steps say nothing, because NaN equals NaN. Lower the learning rate, or "
            "mend the data."
        )

    def _measure_rounding(self) -> list[dict[str, float]]:
        self._by_order = not self._draws_random_numbers()
        if self._by_order:
            self.control = "the rows of each batch turned round"
            found = self._distances(_ROUNDING, [turned_round(batch) for batch in self.batches])
            if self._is_rounding(found):
                return found
        return self._measure_last_bit()

    def _measure_last_bit(self) -> list[dict[str, float]]:
        self._by_order = False
        self.control = "each weight moved by its last bit"
        if self._bits < 24:
            self.control += f" of the {self._bits} that layers compute in"
        return self._distances(_ROUNDING, self.batches, self._moved(0))

    def _is_rounding(self, control: list[dict[str, float]]) -> bool:
        """Return whether a control with rows in another order shows rounding alone.

        It shows more if a loss or a state depends on the order of rows. The test uses the first
        two steps, and leaves out weights and slots: Adam moves a weight with a gradient of zero
        by its whole learning rate.
        """
        within = max(1e-3, 2.0 ** (4 - self._bits))
        trained = {variable.path for variable in self.model.trainable_variables}
        for step, apart in enumerate(control[:2], 1):
            first = self._first_run(step)
            for name, far in apart.items():
                if name not in trained and not name.startswith("optimizer/"):
                    size = float(np.max(np.abs(first[name]), initial=0.0))
                    if far > max(BOUND, within * size):
                        return False
        return True

    def _cannot_tell(self) -> bool:
        """Return whether differences are within bounds only because rounding is large."""
        if all(difference.largest <= BOUND for difference in self.differences()):
            return False
        within, size = max(1e-2, 2.0 ** (4 - self._bits)), 0.0
        for step, apart in enumerate(self._rounding, 1):
            loss = np.abs(self._first_run(step).get("loss", 0.0))
            size = max(size, float(np.max(loss, where=np.isfinite(loss), initial=0.0)))
            if not apart.get("loss", 0.0) <= max(BOUND, within * size):
                return True
        return False

    def _measure_rounding_again(self) -> None:
        """Run two more controls before a difference is reported.

        One control can be too small by chance: if a gradient is zero up to rounding, Adam's
        first steps have the length of the learning rate, and a random sign.
        """
        self._place(self._alone)
        more: list[list[dict[str, float]]] = []
        if self._by_order:
            half = [rolled(batch, rows_of(batch) // 2) for batch in self.batches]
            one = [rolled(batch, 1) for batch in self.batches]
            more = [self._distances(_ROUNDING, batches) for batches in (half, one)]
            if all(map(self._is_rounding, more)):
                self.control += ", and in two other orders"
            else:
                self._rounding = self._measure_last_bit()
        if not self._by_order:
            self.control += ", three times"
            more = [self._distances(_ROUNDING, self.batches, self._moved(seed)) for seed in (1, 2)]
        self._rounding = [
            {name: max(step[name] for step in steps) for name in steps[0]}
            for steps in zip(self._rounding, *more, strict=True)
        ]

    def _moved(self, seed: int) -> Values:
        random = np.random.default_rng(seed)
        return {
            name: moved_by_last_bit(value, random, self._bits)
            for name, value in self._start.items()
        }

    def _draws_random_numbers(self) -> bool:
        last = self._first_run(len(self.batches))
        seeds = [name for name in self._start if name.endswith("seed_generator_state")]
        return any(np.any(last[name] != self._start[name]) for name in seeds)

    def _bounds(self, name: str) -> np.ndarray:
        rounding = np.array([step[name] for step in self._rounding])
        bounds: np.ndarray = np.maximum(
            self._bound, 10 * np.maximum.accumulate(np.nan_to_num(rounding))
        )
        return bounds

    def _sizes(self, step: int) -> dict[str, float]:
        """Return a tenth of the bound in float64 for values of this size."""
        values = self._first_run(step)
        return {
            name: self._bound / 10 * float(np.max(np.abs(value), initial=0.0))
            for name, value in values.items()
        }

    def _file(self, step: int) -> Path:
        return self.folder / f"{step}.npz"

    def _first_run(self, step: int) -> Values:
        return _read(self._file(step))

    # --------------------------------------------------------------------------- cause

    def _find_first(self, unsteady: list[int], names: tuple[str, ...]) -> None:
        over = [d.first_step for d in self.differences() if d.first_step is not None]
        if not over and not unsteady:
            return
        self.first_step = min([*unsteady, *over])
        batch = self.batches[self.first_step - 1]
        start = self._start if self.first_step == 1 else self._first_run(self.first_step - 1)

        def inspect(devices: tuple[str, ...] | None) -> tuple[Values, Values]:
            self._place(devices)
            restore(self.model, start)
            return self._probe.inspect(batch)

        self.first_layer, what = _first_apart(
            inspect(self._alone),
            inspect(self._alone if unsteady else names),
            within=10 * self._bound if self._bits == DOUBLE else max(1e-4, 2.0 ** (4 - self._bits)),
        )
        if unsteady:
            self.cause = _unsteady(self.first_layer)
        else:
            self.cause = _cause(self.first_layer, what, self._bits)


_ROUNDING = "one device, to measure rounding"
"""The name of a control in the progress line."""

_CANNOT_TELL = (
    "On one device, rounding alone moves the loss by more than a hundredth of it, so that a wrong "
    "number could pass for rounding. A lower learning rate, fewer steps, or float64 "
    "(lockstep verify --float64) tells."
)


def _unsteady(layer: str | None) -> str:
    return (
        "The model is not deterministic: two runs on one device from the same start differ as "
        f"well. {_where(layer)}It may draw random numbers, or keep state, in Python when it is "
        "traced: keep them in a keras.random.SeedGenerator or a keras.Variable."
    )


def _cause(layer: str | None, what: str | None, bits: int) -> str:
    if what == "activation":
        return (
            f"{_where(layer)}From the same weights and inputs it gives something else on "
            "several devices. It may read the number of devices, or state that a device keeps."
        )
    if what == "gradient":
        return (
            f"The forward pass is the same; the gradient of {layer} is the first that differs. "
            "A gradient that jumps (a ReLU, a max pooling, a sort) can turn rounding into that; "
            "a custom gradient that reads the devices would too."
        )
    if bits == DOUBLE:
        return (
            "From the same weights, this step alone agrees; over the steps before, the runs part "
            "by more than 1e-10. A part of the model may compute in float32 whatever it is given."
        )
    if bits < 24:
        return (
            "From the same weights, this step alone agrees: rounding grew beyond ten times what it "
            "did in the control on one device. In half precision each device rounds its part of a "
            "gradient before the parts are added, which shows where they cancel, as for a bias "
            "before batch normalization. The same model in float32 or float64 tells whether that "
            "is all."
        )
    return (
        "From the same weights, this step alone agrees: rounding grew over the steps before, "
        "beyond ten times what it did in the control on one device. A network with many kinks "
        "(ReLU, max pooling) or a high learning rate does that. The same comparison in float64 "
        "(lockstep verify --float64) tells rounding from a fault."
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
def _untouched(engine: Engine, model: Any, batch: Batch) -> Iterator[None]:
    """Build the model as `fit` does, and restore its values and devices afterwards."""
    before = engine.attached(model)
    options = None if before is None else engine.input_options(model)
    engine.detach(model)
    start: Values = {}
    try:
        engine.probe(model).build(batch)
        start = snapshot(model)
        yield
    finally:
        engine.detach(model)
        if start:
            restore(model, start)
            model.reset_metrics()
        if before is not None and options is not None:
            with warnings.catch_warnings(action="ignore"):  # given when it was first attached
                engine.attach(model, before, options)


def _write(file: Path, values: Values) -> None:
    arrays: dict[str, Any] = {f"a{n}": value for n, value in enumerate(values.values())}
    np.savez(file, names=np.array(list(values)), **arrays)


def _read(file: Path) -> Values:
    with np.load(file) as arrays:
        return {str(name): arrays[f"a{n}"] for n, name in enumerate(arrays["names"])}
