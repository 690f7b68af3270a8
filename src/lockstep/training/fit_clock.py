"""The clock of one `fit`: every moment belongs to one part."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import keras

from lockstep.core.engine import TEST, TRAIN, Execute, Kind, Session
from lockstep.training.input import HostIterator

Logs = dict[str, Any]

Times = defaultdict[str, float]
"""Seconds by name."""

LOOP = "loop"
"""The steps of training, their batches and their compilation, which are told apart at the end."""

VALIDATION, CHECKPOINT, OTHER = "validation", "checkpoint", "other"

EARLY = (3, 10)
"""The executions that are sampled first."""

EVERY = 100
"""Every so many executions one is sampled."""

now = time.perf_counter
"""The time in seconds. Tests replace it."""


class Clock:
    """What times a `fit`; this one does nothing."""

    def part(self, part: str) -> AbstractContextManager[None]:
        """Count the time inside the context to a part."""
        return nullcontext()

    def steps(
        self, session: Session, kind: Kind, batches: Any, execute: Execute
    ) -> AbstractContextManager[tuple[Iterable[Any], Execute]]:
        """Time the steps of an epoch; return its batches and the function that runs steps."""
        return nullcontext((batches, execute))


NO_CLOCK = Clock()


@dataclass
class Steps:
    """The executions of one kind of steps in a `fit`. Times are in seconds.

    A first execution is one that compiles, or that may. The devices are idle before a sample
    begins, and it ends when they are idle again.

    Attributes:
        executions: How many there were.
        steps: The steps of them.
        drawing: The time to draw their batches.
        firsts: The number of first executions.
        first: The time of first executions, without their batches.
        sampled: The number of steps in samples.
        samples: The time of samples, without their batches.
    """

    executions: int = 0
    steps: int = 0
    drawing: float = 0.0
    drawn: int = 0
    firsts: int = 0
    first: float = 0.0
    sampled: int = 0
    samples: float = 0.0
    ready: bool | None = None
    forms: set[Any] = field(default_factory=set)
    next_sample: int = EARLY[0]
    is_new: bool = False

    def draws(self, batches: Iterator[Any]) -> Any:
        """Draw the next batch."""
        start = now()
        batch = next(batches)
        self.drawing += now() - start
        self.drawn += 1
        self.note(_form(batch))
        return batch

    def note(self, form: Any) -> None:
        """Note the form of an execution or of its batches: a new form may be compiled."""
        if form not in self.forms:
            self.forms.add(form)
            self.is_new = True

    def sample_later(self) -> None:
        """Set which execution is sampled after this one."""
        after = (number for number in EARLY if number > self.executions)
        self.next_sample = next(after, (self.executions // EVERY + 1) * EVERY)


@dataclass(frozen=True)
class Split:
    """What the loop of training has spent, in seconds.

    Attributes:
        input: The wait for data; `None` if the steps include it.
        steps: The steps.
        compile: The compilation of training steps.
        compile_validation: The compilation of validation steps.
        step: One step of training.
    """

    input: float | None
    steps: float
    compile: float
    compile_validation: float
    step: float


class FitClock(Clock):
    """Times one `fit`.

    Where steps run while Python continues, the time of a step is that of samples. The loop waits
    until the devices are idle, draws the batch, runs the step and waits for its outputs.

    Attributes:
        parts: The seconds of each part; those of a callback by its class name.
        callbacks: The seconds of callbacks, by class name.
        ran: The executions by kind.
        is_data_seen: Whether the batches are drawn where this clock can time it.
        adapter: Keras's adapter of the training data.
        steps_per_execution: That of the training.
    """

    def __init__(self) -> None:
        self.parts: Times = defaultdict(float)
        self.callbacks: Times = defaultdict(float)
        self.ran = {TRAIN.name: Steps(), TEST.name: Steps()}
        self.is_data_seen = True
        self.adapter: Any = None
        self.steps_per_execution = 1
        self._times, self._part, self._since = self.parts, OTHER, now()
        self._below = self._times, self._part
        self._outputs: Any = None
        self.started = self._since

    def _switch(self, times: Times, part: str) -> tuple[Times, str]:
        """Count the time from now on to a part; return what it was counted to."""
        time_now = now()
        self._times[self._part] += time_now - self._since
        before = self._times, self._part
        self._times, self._part, self._since = times, part, time_now
        return before

    def stop(self) -> float:
        """Stop, and return the seconds since the start."""
        self._switch(self.parts, OTHER)
        return self._since - self.started

    def split(self) -> Split:
        """Tell apart what the loop has spent."""
        ran, loop = self.ran[TRAIN.name], self.parts[LOOP]
        others, rest = ran.executions - ran.firsts, max(0.0, loop - ran.first - ran.drawing)
        per_execution = rest / others if others else 0.0
        step = ran.samples / ran.sampled if ran.sampled else None
        if step is not None and ran.executions:
            per_execution = step * ran.steps / ran.executions
        compile = min(loop, max(0.0, ran.first - ran.firsts * per_execution))
        steps = loop - compile - min(ran.drawing, loop - compile)
        if step is not None:
            steps = min(step * ran.steps, loop - compile)
        waited = min(ran.drawing, loop - compile - steps) if self.is_data_seen else 0.0
        tested, held_out = self.ran[TEST.name], self.parts[VALIDATION]
        others, rest = tested.executions - tested.firsts, max(0.0, held_out - tested.first)
        usual = tested.firsts * rest / others if others else 0.0
        return Split(
            input=waited if self.is_data_seen else None,
            steps=steps,
            compile=compile,
            compile_validation=min(held_out, max(0.0, tested.first - usual)),
            step=step if step is not None else steps / ran.steps if ran.steps else 0.0,
        )

    @contextmanager
    def part(self, part: str) -> Iterator[None]:
        """Count the time inside the context to a part, but for parts inside it."""
        before = self._switch(self.parts, part)
        try:
            yield
        finally:
            self._switch(*before)

    def call(self, part: str | None, callback: Any, hook: str, *args: Any, **kwargs: Any) -> None:
        """Call a hook of a callback, and count its time to a part, or to its class."""
        times = (self.callbacks, type(callback).__name__) if part is None else (self.parts, part)
        before = self._switch(*times)
        below, self._below = self._below, before
        try:
            getattr(callback, hook)(*args, **kwargs)
        finally:
            self._below = below
            self._switch(*before)

    def fetched(self, numbers: Callable[[Logs], Logs], logs: Logs) -> Logs:
        """Fetch the logs that a callback reads: it waits for the steps, and this is their time."""
        before = self._switch(*self._below)
        try:
            return numbers(logs)
        finally:
            self._switch(*before)

    # ------------------------------------------------------------------ steps

    @contextmanager
    def steps(
        self, session: Session, kind: Kind, batches: Any, execute: Execute
    ) -> Iterator[tuple[Iterable[Any], Execute]]:
        """Time the steps of an epoch of training or validation."""
        ran, trains = self.ran[kind.name], kind is TRAIN
        on_host = isinstance(batches, HostIterator)
        if ran.ready is None:
            ran.ready = session.first_work(kind, 0) is None
        if trains:
            self.adapter = batches.data_adapter
            self.steps_per_execution = batches.steps_per_execution
            # Keras's iterator on TensorFlow is read within the step.
            self.is_data_seen = on_host or keras.backend.backend() != "tensorflow"
        samples = trains and self.is_data_seen
        compiles = session.is_compiled()
        sampled = False

        def each() -> Iterator[Any]:
            nonlocal sampled
            source, inner, timed = iter(batches), None, None
            while True:
                sampled = samples and ran.executions + 1 >= ran.next_sample
                if sampled:
                    _wait(session, self._outputs)
                ran.is_new = False
                start = now()
                try:
                    first, last, iterator = next(source)
                except StopIteration:
                    return
                finally:
                    ran.drawing += now() - start
                if on_host:
                    if iterator is not inner:
                        inner, timed = iterator, _Timed(iterator, ran)
                    iterator = timed
                elif type(iterator) is list and iterator:  # Keras has drawn the batches
                    ran.note(_form(iterator[0]))
                yield first, last, iterator

        def run(iterator: Any, times: int) -> Any:
            drawing, drawn = ran.drawing, ran.drawn
            steps = len(iterator) if type(iterator) is list else times
            start = now()
            outputs = execute(iterator, times)
            steps = ran.drawn - drawn if on_host else steps
            ran.note(steps)
            is_first = not ran.ready or (ran.is_new and compiles)
            if is_first or sampled:
                _wait(session, outputs)
            seconds = now() - start - (ran.drawing - drawing)
            ran.executions += 1
            ran.steps += steps
            if is_first:
                ran.firsts += 1
                ran.first += seconds
                ran.ready = ran.ready or session.first_work(kind, ran.steps) is None
            elif sampled:
                ran.sampled += steps
                ran.samples += seconds
                ran.sample_later()
            self._outputs = outputs
            return outputs

        before = self._switch(self.parts, LOOP if trains else self._part)
        try:
            yield each(), run
            _wait(session, self._outputs)
        finally:
            self._outputs = None
            self._switch(*before)


class _Timed:
    """An iterator over batches that times each draw."""

    __slots__ = ("_batches", "_ran")

    def __init__(self, batches: Iterator[Any], ran: Steps) -> None:
        self._batches, self._ran = batches, ran

    def __iter__(self) -> "_Timed":
        return self

    def __next__(self) -> Any:
        return self._ran.draws(self._batches)


def _form(batch: Any) -> Any:
    """Return the shape of the first array of a batch."""
    while isinstance(batch, tuple | list | dict) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    shape = getattr(batch, "shape", None)
    return None if shape is None else tuple(shape)


def _wait(session: Session, outputs: Any) -> None:
    """Wait until the devices have run a step, by one value of its outputs."""
    for value in reversed(keras.tree.flatten(outputs) if outputs else []):
        if keras.ops.is_tensor(value):
            keras.ops.convert_to_numpy(value)
            return
    if outputs is not None:  # a step of the user may return no logs
        session.sync()
        for weight in session.model.trainable_variables[-1:]:
            keras.ops.convert_to_numpy(weight)
