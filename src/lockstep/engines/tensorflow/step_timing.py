"""Counts and times the training steps on TensorFlow."""

import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from lockstep.engines.patched import patched
from lockstep.keras_compat import TAKING_OPTIONALS, function_of_iterator
from lockstep.training.step_clock import StepClock


class StepCounter:
    """Count the training steps of a model, and their rows, in the program that runs them.

    An execution draws its batches inside its program, so Python sees neither their number nor
    their rows.

    Attributes:
        compiling: Seconds of the executions in which the step was traced.
    """

    def __init__(self) -> None:
        self.compiling = 0.0
        self._traced = False
        with tf.device("CPU:0"):
            # Steps, the rows of all, and the rows of the largest.
            self._counts = tf.Variable([0, 0, 0], dtype="int64", trainable=False)

    def function(self, model: Any, step: Callable[[Any], Any]) -> Any:
        """Return Keras's function over an iterator for this step, made to count."""

        def traced_step(batch: Any) -> Any:
            self._traced = not tf.executing_eagerly()
            return step(batch)

        convert = getattr(model, TAKING_OPTIONALS)

        def converting(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
            converted = convert(step)

            def counted(batch: Any) -> Any:
                self._count(batch)
                return converted(batch)

            return counted

        with patched([(model, TAKING_OPTIONALS, converting)]):
            return function_of_iterator(model, traced_step)

    def _count(self, batch: Any) -> None:
        with tf.device("CPU:0"):
            leaves = [leaf for leaf in keras.tree.flatten(batch) if hasattr(leaf, "dtype")]
            rows = [tf.shape(leaf, "int64")[0] for leaf in leaves if leaf.shape.rank != 0]
            rows = rows[0] if rows else tf.constant(0, "int64")
            steps, every, largest = tf.unstack(self._counts)
            self._counts.assign(tf.stack([steps + 1, every + rows, tf.maximum(largest, rows)]))

    def reset(self) -> None:
        """Start at zero."""
        self._counts.assign([0, 0, 0])

    def run(self, function: Callable[[Any], Any], iterator: Any) -> tuple[Any, list[int]]:
        """Run one execution. Return its outputs, and the counts since the reset."""
        self._traced, start = False, time.perf_counter()
        outputs = function(iterator)
        if self._traced:
            self.compiling += time.perf_counter() - start
        return outputs, self._counts.numpy().tolist()


class TensorFlowClock(StepClock):
    """Time the steps of an epoch on TensorFlow; see `StepClock`.

    Args:
        most: The number of steps after which training ends.
        counter: Counts the steps of the model.
    """

    def __init__(self, most: int, counter: StepCounter) -> None:
        super().__init__(most)
        self._counter = counter

    def counting(self, function: Any) -> Any:
        """Return the step function of the model, made to report what its program has counted."""
        self._counter.reset()
        steps = rows = 0

        def counted(iterator: Any) -> Any:
            nonlocal steps, rows
            outputs, (now, every, largest) = self._counter.run(function, iterator)
            self.count(now - steps, every - rows, largest)
            steps, rows = now, every
            return outputs

        return counted

    def wait(self) -> None:
        """Wait until every device has done its steps."""
        tf.test.experimental.sync_devices()
