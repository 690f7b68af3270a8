"""A process that waits for another one in vain raises after LOCKSTEP_PATIENCE seconds."""

import pytest

from lockstep.errors import ProcessesDisagree
from lockstep.processes.coordination import patience
from tests.processes.test_several import run_both

WAITS = " seconds in {} for process {}, which has ended, is suspended, or makes different calls."

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
"""What the processes do, and the call in which each of them waits then."""

SCRIPT = """
from tests.processes.test_patience import WAITING

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
def test_processes_that_wait_for_one_another_are_told(cases, tmp_path):
    found, _ = run_both(SCRIPT.format(cases=cases), tmp_path, LOCKSTEP_PATIENCE="20")
    for case in cases:
        texts = []
        for each in found:
            kind, text = each["errors"][case]
            assert kind == "ProcessesDisagree"
            assert len(text.splitlines()) <= 3
            texts.append(text)
        # The first one to lose patience leaves its call, which the other one may see.
        waits = [WAITS.format(WAITING[case][1][rank], 1 - rank) in texts[rank] for rank in (0, 1)]
        left = [f"Process {1 - rank} left its" in texts[rank] for rank in (0, 1)]
        assert any(waits), texts
        assert all(map(any, zip(waits, left, strict=True))), texts
    assert found[0]["history"] == found[1]["history"]  # all go on together after it


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan"])
def test_a_patience_that_is_no_number_is_refused(text, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_PATIENCE", text)
    with pytest.raises(ProcessesDisagree, match=f"LOCKSTEP_PATIENCE='{text}' is set, but a pos"):
        patience()
