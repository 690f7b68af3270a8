"""Which steps of a call are compared with one device again, besides the first one of a form.

What code reads may change between two steps in ways that no list completes. So its outcome is
compared again. The intervals double up to a bound, so that a long call compares few steps.
"""

from dataclasses import dataclass

from lockstep.engines.replicas.sketches import Mismatch
from lockstep.errors import ProcessesDisagree

_KINDS = {
    "fit": "train",
    "train_on_batch": "train",
    "evaluate": "test",
    "test_on_batch": "test",
    "predict": "predict",
    "predict_on_batch": "predict",
}
"""The kind of the steps of a call."""

_MOST_BETWEEN = 256
"""Steps between two comparisons, at most: a loop of calls on one batch has no end of an epoch."""


@dataclass
class StepCounts:
    """How many steps of one kind there were, and which of them agreed.

    Attributes:
        call: The name of the call.
        calls: How many calls there were.
        number: The number of the step that runs, in its call.
        agreed: The last step of the call that agreed with one device, 0 if there is none.
    """

    call: str = ""
    calls: int = 0
    number: int = 0
    agreed: int = 0

    def are_due(self) -> bool:
        """Return whether the step that runs is compared, if code may run between two steps.

        These are steps 2, 4, 8 and so on of a call, from 256 on each 256th one, and the first steps
        of such calls.
        """
        number = self.calls if self.number == 1 else self.number
        return number > 1 and (number & (number - 1) == 0 or number % _MOST_BETWEEN == 0)


class RepeatedChecks:
    """Counts the steps in a call, and those that agreed with one device.

    Attributes:
        steps: The steps of each kind.
    """

    def __init__(self) -> None:
        self.steps = {kind: StepCounts() for kind in _KINDS.values()}

    def begin_call(self, name: str) -> None:
        """Note that a method of the model is called; calls on one batch after another are one."""
        if name not in _KINDS:
            return
        steps = self.steps[_KINDS[name]]
        if name != steps.call or not name.endswith("on_batch"):
            steps.call, steps.calls, steps.number, steps.agreed = name, steps.calls + 1, 0, 0

    def error(self, kind: str, model: str, found: Mismatch, *, after: bool) -> ProcessesDisagree:
        """Return the error for a step that several devices compute differently from one.

        Args:
            kind: The kind of the step.
            model: The name of the model.
            found: What differs.
            after: Whether the step has run.
        """
        steps = self.steps[kind]
        place = "After" if after else "In"
        than = "between two runs of one device" if found.is_of_one else "from one device"
        number, call = steps.number, steps.call
        return ProcessesDisagree(
            f"{place} {kind} step {number} of this {call} of {model!r}, {found} {than}; the "
            f"last step that agreed is {steps.agreed or 'none'}.\nA value that its code reads "
            "has changed, and the other processes do not see the change. The steps since then "
            "may be wrong.\nKeep the value in a variable or an attribute of a layer, or call "
            "lockstep.release(model). Continue from an earlier file."
        )
