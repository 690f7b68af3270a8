"""In two processes, too, a thread gathers the rows of arrays, and nothing else changes."""

import keras
import numpy as np

from tests.conformance.common import assert_same, compile_, data, model
from tests.processes.test_several import run_both, weights_of

TRAIN = """
import threading
from lockstep.training.arrays import Arrays

batch, by = Arrays.batch, []

def noting(self, rows):
    by.append(threading.current_thread().name)
    return batch(self, rows)

Arrays.batch = noting
made = model(compiled=False)
lockstep.distribute(made, prefetch=2)
compile_(made)
x, y = data()
np.random.seed(7 + rank)  # the order of rows is that of process 0
stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0)
history = made.fit(
    x, y, batch_size=7, epochs=4, validation_data=(x, y), callbacks=[stop], verbose=0
).history
predicted = made.predict(x, batch_size=9, verbose=0)
report(made, history, predicted=predicted.tolist(), by=sorted(set(by)))
"""


def test_two_processes_gather_rows_ahead_of_their_turn(tmp_path):
    (first, second), _ = run_both(TRAIN, tmp_path)
    assert first == second
    assert "lockstep-input" in first["by"]
    one = model(compiled=False)
    compile_(one)
    x, y = data()
    np.random.seed(7)
    stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0)
    history = one.fit(
        x, y, batch_size=7, epochs=4, validation_data=(x, y), callbacks=[stop], verbose=0
    ).history
    assert_same(first["history"], history)
    assert_same(np.array(first["predicted"]), one.predict(x, verbose=0))
    assert_same(weights_of(tmp_path, 1), weights_of(tmp_path, 0), atol=0)
