"""Processes that wait for one another, each for a word that the other one will not say."""

import pytest

from tests.processes.test_several import run_both

WAITS = "waits in {} for process {}, which waits in {} at another place: none would go on."

WAITING = {
    "an evaluation in one process": (
        "rank or made.evaluate(x, y, verbose=0); made.fit(x, y, **each_7)",
        ("evaluate", "fit"),
    ),
    "an evaluation within a fit in one process": (
        "made.fit(x, y, **each_7, callbacks=[calling(lambda: rank or made.evaluate(x, y))])",
        ("fit", "fit"),
    ),
    "a file that is saved in another process alone": (
        "made.fit(x, y, **each_7, callbacks=[calling(lambda: rank and made.save('a.keras'))])",
        ("fit", "fit"),
    ),
    "a validation in one process, of a fit of its own": (
        "lockstep.distribute(Own(made)).fit(x, y, **each_7)",
        ("fit", "fit"),
    ),
}
"""What the processes do; and in which calls each of them waits then."""

SCRIPT = """
from tests.processes.test_waits import WAITING

x, y = data()
each_7 = {{"batch_size": 7, "shuffle": False, "verbose": 0, "epochs": 2}}

def calling(function):
    return keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: function())

class Own(keras.Model):
    def __init__(self, inner):
        super().__init__(inner.inputs, inner.outputs)
        compile_(self)

    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs, validation_data=None if rank else (x, y))

errors = {{}}
for case in {cases}:
    made = lockstep.distribute(model())
    try:
        exec(WAITING[case][0])
    except LockstepError as error:
        errors[case] = [type(error).__name__, str(error)]
made = lockstep.distribute(model())
report(made, made.fit(x, y, **each_7).history, errors=errors)
"""


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(["an evaluation in one process"], id="sample"),
        pytest.param([*WAITING][1:], id="rest", marks=pytest.mark.whole),
    ],
)
def test_processes_that_would_wait_for_one_another_for_ever_are_told(cases, tmp_path):
    found, _ = run_both(SCRIPT.format(cases=cases), tmp_path)
    for case in cases:
        calls = WAITING[case][1]
        for rank, each in enumerate(found):
            kind, words = each["errors"][case]
            assert kind == "ProcessesDisagree"
            text = WAITS.format(calls[rank], 1 - rank, calls[1 - rank])
            assert words.startswith(f"Process {rank} {text}"), case
            assert len(words.splitlines()) <= 3
    assert found[0]["history"] == found[1]["history"]  # all go on together after it
