"""Data that ends, or fails, in one process earlier than in another."""

import numpy as np
import pytest

from tests.conformance.common import assert_same, data, model
from tests.processes.test_several import run_both, weights_of

ENDS = "Process 1 ends after {} batches, but process 0 has more, and a step needs every process."
LEFT = "Process 1 left its fit with an error or an interrupt, but process 0 continues, and"
DONE = "Process 1 has finished its fit, but process 0 continues, and"

EARLIER = {
    "fit": ("made.fit(batches(8 - 3 * rank), verbose=0)", 5, ENDS.format(5)),
    "fewer than steps_per_epoch": (
        "made.fit(batches(8 - 3 * rank), steps_per_epoch=7, verbose=0)",
        5,
        ENDS.format(5),
    ),
    "a later epoch": (
        "made.fit(batches(8 - 3 * rank), steps_per_epoch=3, epochs=2, verbose=0)",
        5,
        ENDS.format(2),
    ),
    "several steps in one program": (
        "at_once(made); made.fit(batches(8 - 3 * rank), verbose=0)",
        3,
        ENDS.format(5),
    ),
    "evaluate": ("made.evaluate(batches(8 - 3 * rank), verbose=0)", 0, ENDS.format(5)),
    "predict": ("made.predict(batches(8 - 3 * rank), verbose=0)", 0, ENDS.format(5)),
    "a fit of its own": (
        "made = lockstep.distribute(Own(made)); made.fit(batches(8 - 3 * rank), verbose=0)",
        5,
        ENDS.format(5),
    ),
    "an error of the data": ("made.fit(Items(), shuffle=False, verbose=0)", 4, LEFT),
    "an error of the first batch": (
        "made.fit(Items(fails=0), shuffle=False, verbose=0)",
        0,
        LEFT,
    ),
    "an error of a callback": (
        "made.fit(batches(8), callbacks=[fails('on_train_batch_end', 2)], verbose=0)",
        3,
        LEFT,
    ),
    "an error between two epochs": (
        "made.fit(x, y, **each_7, epochs=2, callbacks=[fails('on_epoch_end')])",
        8,
        LEFT,
    ),
    "an error before the first step": (
        "made.fit(x, y, **each_7, callbacks=[fails('on_train_begin')])",
        0,
        LEFT,
    ),
    "an error after the last step": (
        "made.fit(x, y, **each_7, callbacks=[fails('on_train_end')])",
        8,
        LEFT,
    ),
    "an error before a validation": (
        "made.fit(x, y, **each_7, validation_data=(x, y), callbacks=[fails('on_test_begin')])",
        8,
        LEFT,
    ),
    "a stop between two epochs": (
        "made.fit(x, y, **each_7, epochs=2, callbacks=[stops('on_epoch_end')])",
        8,
        DONE,
    ),
    "an error of the data when they are first looked at": (
        "made.fit(empty() if rank else batches(8), verbose=0)",
        0,
        LEFT,
    ),
    "an error of validation data when they are first looked at": (
        "made.fit(x, y, **each_7, validation_data=empty() if rank else batches(8), "
        "validation_steps=2)",
        8,
        LEFT,
    ),
    "an error in a fit of its own": (
        "made = lockstep.distribute(Own(made)); "
        "made.fit(x, y, **each_7, epochs=2, callbacks=[fails('on_epoch_end')])",
        8,
        LEFT,
    ),
    "a stop of a fit of its own": (
        "made = lockstep.distribute(Own(made)); "
        "made.fit(x, y, **each_7, epochs=2, callbacks=[stops('on_epoch_end')])",
        8,
        DONE,
    ),
    "a stop of one process within an epoch of arrays": (
        "made.fit(x, y, **each_7, callbacks=[stops('on_train_batch_end', 2)])",
        3,
        ENDS.format(3),
    ),
    "an error of a callback within an epoch of arrays": (
        "made.fit(x, y, **each_7, callbacks=[fails('on_train_batch_end', 2)])",
        3,
        LEFT,
    ),
    "an error of a callback that one process alone has": (
        "made.fit(x, y, **each_7, callbacks=[fails('on_train_batch_end', 2)] * rank)",
        3,
        LEFT,
    ),
    "a stop of one process": (
        "made.fit(batches(8), callbacks=[stops('on_train_batch_end', 2)], verbose=0)",
        3,
        ENDS.format(3),
    ),
}
"""What ends earlier in process 1; after how many steps; and what it says in process 0."""

SAMPLE = [
    "fewer than steps_per_epoch",
    "several steps in one program",
    "evaluate",
    "a stop of one process within an epoch of arrays",
    "an error of a callback that one process alone has",
    "an error of the data",
    "an error between two epochs",
    "an error of validation data when they are first looked at",
    "an error in a fit of its own",
    "a stop between two epochs",
]

SCRIPT = """
from jax._src import distributed
from tests.processes.test_ends import EARLIER

x, y = data(7 * 8)

def batches(count):
    return ((x[i * 7 : i * 7 + 7], y[i * 7 : i * 7 + 7]) for i in (j % 8 for j in range(count)))

def empty():
    raise OSError("nothing is mounted")
    yield

def kept():
    return len(distributed.global_state.client.key_value_dir_get("lockstep/"))

def at_once(made):
    made.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", steps_per_execution=3)

class Items(keras.utils.PyDataset):
    def __init__(self, fails=4):
        super().__init__()
        self.fails = fails

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if rank == 1 and index == self.fails:
            raise OSError("the disk is gone")
        return x[index * 7 : index * 7 + 7], y[index * 7 : index * 7 + 7]

each_7 = {{"batch_size": 7, "shuffle": False, "verbose": 0}}

def fails(hook, at=0):
    def fail(index=None, logs=None):
        if rank == 1 and (index == at or not isinstance(index, int)):
            raise OSError("the disk is full")

    return calling(hook, fail)

def stops(hook, at=0):
    def stop(index, logs=None):
        callback.model.stop_training = rank == 1 and index == at

    callback = calling(hook, stop)
    return callback

def calling(hook, function):
    callback = keras.callbacks.Callback()
    setattr(callback, hook, function)
    return callback

class Own(keras.Model):
    def __init__(self, inner):
        super().__init__(inner.inputs, inner.outputs)
        compile_(self)

    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)

errors, weights = {{}}, {{}}
for case in {cases}:
    call, *_ = EARLIER[case]
    made = lockstep.distribute(model())
    try:
        exec(call)
    except (LockstepError, OSError) as error:
        errors[case] = [type(error).__name__, str(error)]
    weights[case] = [value.tolist() for value in made.get_weights()]

# All end together: often enough for what was said to be forgotten.
left = kept()
made = lockstep.distribute(model())
history = made.fit(batches(16), verbose=0).history
evaluated = made.evaluate(batches(160), verbose=0)
predicted = made.predict(batches(8), verbose=0)
report(made, history, errors=errors, weights=weights, evaluated=evaluated,
       predicted=predicted.tolist(),
       kept=[left, kept()])
"""


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SAMPLE, id="sample"),
        pytest.param([c for c in EARLIER if c not in SAMPLE], id="rest", marks=pytest.mark.whole),
    ],
)
@pytest.mark.whole
def test_no_process_waits_for_one_that_has_no_more_batches(cases, tmp_path):
    found, _ = run_both(SCRIPT.format(cases=cases), tmp_path)
    x, y = data(7 * 8)
    after = {}
    for case in cases:
        _, steps, text = EARLIER[case]
        kind, words = found[0]["errors"][case]
        assert kind == "ProcessesDisagree", case
        assert text in words, case
        assert len(words.splitlines()) <= 3
        assert max(map(len, words.splitlines())) <= 200
        if text == LEFT:
            assert found[1]["errors"][case][0] == "OSError"
        elif text == DONE:
            assert "Process 0 left its fit" in found[1]["errors"][case][1]
        else:
            assert found[1]["errors"][case] == [kind, words], case
        assert found[0]["weights"][case] == found[1]["weights"][case], case
        if steps not in after:
            one = model()
            if steps:
                one.fit(x[: steps * 7], y[: steps * 7], batch_size=7, shuffle=False, verbose=0)
            after[steps] = one.get_weights()
        assert_same([np.array(each) for each in found[0]["weights"][case]], after[steps])

    one = model()
    for _ in range(2):
        one.fit(x, y, batch_size=7, shuffle=False, verbose=0)
    assert_same(found[0]["evaluated"], one.evaluate(x, y, batch_size=7, verbose=0))
    assert_same(np.array(found[0]["predicted"]), one.predict(x, batch_size=7, verbose=0))
    mine = [v for name, v in weights_of(tmp_path, 0).items() if not name.startswith("optimizer/")]
    assert_same(mine[: len(one.variables)], [np.asarray(v.value) for v in one.variables])
    left, kept = found[0]["kept"]
    assert kept < left + 30  # where two processes said some 200 words each
