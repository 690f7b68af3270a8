"""The clock of one `fit`: every moment belongs to one part."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from lockstep.core.engine import TEST, TRAIN, Execute, Kind, Session
from lockstep.training.input import HostIterator

Logs = dict[str, Any]

Times = defaultdict[str, float]
"""Seconds by name."""

LOOP = "loop"
"""The steps of training, their batches and their compilation, which are told apart at the end."""

VALIDATION, CHECKPOINT, OTHER = "validation", "checkpoint", "other"

FIRST, EVERY = 3, 250
"""The first execution that is sampled, and the most from one sample to the next.

Each sample is half as many executions later again as the one before, so that a short `fit` has
several. At every 100th, a fit of short steps took 3 % longer.
"""

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


@dataclass(slots=True)
class StepTimes:
    """The executions of one kind of steps in a `fit`. Times are in seconds.

    A first execution is one that compiles, or that may. The devices are idle before a sample
    begins, and it ends when they are idle again.

    Attributes:
        executions: How many there were.
        steps: The steps of them.
        drawing: The time to draw their batches.
        drawn: The number of batches that were drawn within an execution.
        firsts: The number of steps in first executions.
        first: The time of first executions, without their batches.
        samples: The time of a step in each sample, without its batch.
        ready: Whether the next step waits for nothing; `None` before the first one.
        is_new: Whether this execution has a form that none before had.
        next_sample: The number of the execution that is the next sample.
    """

    executions: int = 0
    steps: int = 0
    drawing: float = 0.0
    drawn: int = 0
    firsts: int = 0
    first: float = 0.0
    samples: list[float] = field(default_factory=list)
    ready: bool | None = None
    is_new: bool = False
    next_sample: int = FIRST
    _forms: set[Any] = field(default_factory=set)

    def note_form(self, form: Any) -> None:
        """Note the form of an execution, or of its batches: a new form may be compiled."""
        if form not in self._forms:
            self._forms.add(form)
            self.is_new = True

    def note_sample(self, steps: int, seconds: float) -> None:
        """Add a sample, and choose the next one."""
        self.samples.append(seconds / steps)
        self.next_sample = self.executions + min(self.executions // 2 + 1, EVERY)

    def compile(self, seconds: float, step: float | None = None) -> float:
        """Return what first executions took beyond other ones.

        Args:
            seconds: The time of all executions.
            step: The time of a step, if samples tell it.
        """
        others = self.steps - self.firsts
        if step is None:
            step = max(0.0, seconds - self.first) / others if others else 0.0
        return max(0.0, self.first - self.firsts * step)

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Draw batches, with their time and their form; this runs for every batch."""
        form_before = None
        while True:
            start = now()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.drawing += now() - start
            self.drawn += 1
            leaf = batch[0] if type(batch) is tuple and batch else batch
            form = leaf.shape if type(leaf) is np.ndarray else _form(leaf)
            if form != form_before:
                self.note_form(form)
                form_before = form
            yield batch


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
        platform: The kind of the devices, for example `"gpu"`.
        steps_per_execution: That of the training.
    """

    def __init__(self) -> None:
        self.parts: Times = defaultdict(float)
        self.callbacks: Times = defaultdict(float)
        self.ran = {TRAIN.name: StepTimes(), TEST.name: StepTimes()}
        self.is_data_seen = True
        self.adapter: Any = None
        self.platform = ""
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
        step = statistics.median(ran.samples) if ran.samples else None
        compile = min(loop, ran.compile(loop - ran.drawing, step))
        if step is None:
            steps = loop - compile - min(ran.drawing, loop - compile)
            step = steps / ran.steps if ran.steps else 0.0
        else:
            steps = min(step * ran.steps, loop - compile)
        waited = min(ran.drawing, loop - compile - steps)
        held_out = self.parts[VALIDATION]
        of_validation = self.ran[TEST.name].compile(held_out)
        return Split(
            input=waited if self.is_data_seen else None,
            steps=steps,
            compile=compile,
            compile_validation=min(held_out, of_validation),
            step=step,
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
            self.adapter, self.platform = batches.data_adapter, session.devices[0].split(":")[0]
            self.steps_per_execution = batches.steps_per_execution
            # Keras's iterator on TensorFlow is read within the step.
            self.is_data_seen = on_host or keras.backend.backend() != "tensorflow"
        samples = trains and self.is_data_seen
        compiles = session.is_compiled()
        sampled, length = False, 0

        def each() -> Iterator[Any]:
            nonlocal sampled, length
            source, timed = None, None
            if sampled := samples and ran.executions + 1 >= ran.next_sample:
                _wait(session, self._outputs)
            start = now()
            for first, last, iterator in batches:
                if on_host:
                    if iterator is not source:
                        ran.drawing += now() - start
                        source, timed = iterator, ran.timed(iterator)
                    yield first, last, timed
                else:
                    ran.drawing += now() - start
                    length = last - first + 1
                    if type(iterator) is list and iterator:  # Keras has drawn the batches
                        length = len(iterator)
                        ran.note_form(_form(iterator[0]))
                    elif batches.num_batches:  # Keras's last execution counts steps it has not
                        length = min(length, batches.num_batches - first)
                    yield first, last, iterator
                if sampled := samples and ran.executions + 1 >= ran.next_sample:
                    _wait(session, self._outputs)
                start = now()
            ran.drawing += now() - start

        def run(iterator: Any, times: int) -> Any:
            drawing, drawn, start = ran.drawing, ran.drawn, now()
            self._outputs = outputs = execute(iterator, times)
            ran.executions += 1
            steps = ran.drawn - drawn if on_host else length
            ran.steps += steps
            if times > 1:
                ran.note_form(steps)
            if sampled or ran.is_new or not ran.ready:
                is_first = not ran.ready or (ran.is_new and compiles)
                ran.is_new = False
                if not (is_first or sampled):
                    return outputs
                _wait(session, outputs)
                seconds = now() - start - (ran.drawing - drawing)
                if is_first:
                    ran.firsts += steps
                    ran.first += seconds
                    ran.ready = ran.ready or session.first_work(kind, ran.steps) is None
                else:
                    ran.note_sample(steps, seconds)
            return outputs

        before = self._switch(self.parts, LOOP if trains else self._part)
        try:
            yield each(), run
            _wait(session, self._outputs)
        finally:
            self._outputs = None
            self._switch(*before)


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
