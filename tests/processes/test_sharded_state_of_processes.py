"""Two processes of two devices with state in shards train what one device trains."""

import keras
import numpy as np
import pytest

from tests.processes.common import warm
from tests.processes.test_several import run_both
from tests.tiers import rest

ROWS = 21
RNG = np.random.default_rng(4)
X, Y = RNG.normal(size=(ROWS, 64)), RNG.normal(size=(ROWS, 3))


def network(seed=5):
    keras.utils.set_random_seed(seed)
    made = keras.Sequential([keras.Input((64,))])
    made.add(keras.layers.Dense(128, activation="tanh"))
    made.add(keras.layers.Dense(128, activation="tanh"))
    made.add(keras.layers.Dense(3))
    made.compile(keras.optimizers.Adam(1e-3), "mse", metrics=["mae"])
    return made


def trained(made, **options):
    options = {"batch_size": 6, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    history = made.fit(X, Y, **options).history
    scores = made.evaluate(X, Y, batch_size=4, verbose=0)
    return [history, scores, made.predict(X, batch_size=8, verbose=0)]


def values(made):
    return [np.array(variable) for variable in (*made.variables, *made.optimizer.variables)]


def distance(mine, theirs):
    pairs = zip(keras.tree.flatten(mine), keras.tree.flatten(theirs), strict=True)
    return float(max(np.max(np.abs(np.subtract(*pair))) for pair in pairs))


def bytes_here(made):
    """Bytes of large variables on the devices of this process, and of all of them."""
    every = [v.value for v in (*made.variables, *made.optimizer.variables)]
    large = [value for value in every if value.nbytes >= 2**16]
    held = [shard.data.nbytes for value in large for shard in value.addressable_shards]
    return [sum(held), sum(value.nbytes for value in large)]


BEGIN = """
jax.config.update("jax_enable_x64", True)
keras.config.set_floatx("float64")
from lockstep.keras_compat import compute_in_float64
compute_in_float64()
from tests.processes.test_sharded_state_of_processes import *
one = network()  # without lockstep, on one device of this process
"""

TRAIN = """
expected, weights = trained(one), values(one)
with lockstep.sharded():
    made = network(5 if rank == 0 else 99)
lockstep.distribute(made, state="sharded")
callbacks = [
    keras.callbacks.ModelCheckpoint("last.keras"),
    keras.callbacks.ModelCheckpoint(f"of-{rank}.weights.h5", save_weights_only=True),
]
far = [distance(trained(made, callbacks=callbacks, verbose=2), expected)]
far.append(distance(values(made), weights))
held = bytes_here(made)
made.save(f"saved-by-{rank}.keras")
far.append(distance(made(X[:5]), one(X[:5])))
made.load_weights("saved-by-0.keras")
made.set_weights(made.get_weights())
made.layers[1].kernel.assign(made.layers[1].kernel)
made.layers[1].kernel.assign(jax.numpy.asarray(weights[2]))
assert bytes_here(made) == held
for name in ("last.keras", "saved-by-0.keras"):
    far.append(distance(values(keras.models.load_model(name)), weights))
with lockstep.sharded():
    again = keras.models.load_model("last.keras")  # with slots
lockstep.distribute(again, state="sharded")
far.append(distance(values(again), weights))
again.layers[0].enable_lora(4)
again.compile("sgd", "mse")
again.save("lora.keras")  # the layer adds both parts
plain = keras.models.load_model("lora.keras")
far.append(distance(plain.predict(X, verbose=0), again.predict(X, verbose=0)))
copied = keras.models.clone_model(made)
copied.set_weights(made.get_weights())
refused = []
for reads in (
    keras.callbacks.BackupAndRestore("backup"),
    keras.callbacks.TensorBoard("logs", histogram_freq=1),
):
    try:
        made.fit(X, Y, verbose=0, callbacks=[reads])
    except lockstep.errors.UnsupportedModel as error:
        refused.append(str(error))
lockstep.release(made)
assert {len(v.value.devices()) for v in made.variables} == {1}
far += [distance(model.predict(X, verbose=0), expected[2]) for model in (made, copied)]
print("\\nREPORT", json.dumps({"far": far, "held": held, "refused": refused}))
"""


def test_two_processes_give_what_one_device_gives(tmp_path):
    (first, second), printed = run_both(BEGIN + TRAIN, tmp_path)
    assert "lockstep: jax, 4 devices" in printed[0]
    assert ", state sharded: 0.2 of 0.6 MB each" in printed[0]
    assert "lockstep:" not in printed[1]
    assert max(first["far"] + second["far"]) <= 1e-10
    held, every = first["held"]
    assert held * 2 == every  # on two of the four devices
    assert second["held"] == first["held"]
    # It waited two minutes for processes that do not run the callback.
    backup, histograms = first["refused"]
    assert backup.startswith(
        "BackupAndRestore was given, but the variables are sharded across several processes"
    )
    assert histograms.startswith("TensorBoard with histograms was given")
    assert not [*tmp_path.glob("*by-1.keras"), *tmp_path.glob("of-1*")]


STOPS = """
made = lockstep.distribute(network(5 if rank == 0 else 99), state="sharded")
steps, checkpoint = [], lockstep.Checkpoint("run", steps=2)

class Cut(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        steps.append(batch)
        if len(steps) == 7:
            raise InterruptedError

    def get_state(self):
        return None

    def set_state(self, state):
        pass

try:
    trained(made, epochs=3, callbacks=[checkpoint, Cut()])
except InterruptedError:
    pass
print("\\nREPORT", json.dumps(len(steps)))
"""

GOES_ON = """
import sys
rank, lockstep = 0, __import__("lockstep")
import jax, keras, numpy as np
{begin}
expected = trained(one, epochs=3)

class Cut(keras.callbacks.Callback):
    def get_state(self):
        return None

    def set_state(self, state):
        pass

made = lockstep.distribute(network(99), {devices}, state="{state}")
trained(made, epochs=3, callbacks=[lockstep.Checkpoint("run", steps=2), Cut()])
print(distance(values(made), values(one)))
"""


@pytest.mark.parametrize(("devices", "state"), [(1, "replicated"), *rest((3, "sharded"))])
def test_a_checkpoint_of_two_processes_goes_on_in_one(tmp_path, devices, state):
    found, _ = run_both(BEGIN + STOPS, tmp_path)
    assert found == [7, 7]
    script = GOES_ON.format(begin=BEGIN, devices=devices, state=state)
    last = warm(["-c", script], tmp_path, LOCKSTEP_REHEARSE="4").splitlines()[-1]
    assert float(last) <= 1e-10


ALONE = """
import time
from lockstep.errors import LockstepError
from lockstep.processes import process_group
made = lockstep.distribute(network(), state="sharded")
kernels = [layer.kernel for layer in made.layers[:2]]
said = []

def ends(call):
    try:
        call()
    except LockstepError as error:
        said.append(str(error))

if rank == 0:
    ends(lambda: np.array(kernels[1]))  # the other process reads nothing
    ends(lambda: made.save_weights("alone.weights.h5"))
else:
    time.sleep(7)
predicted = made.predict(X, verbose=0)
if rank == 0:
    try:
        made.save_weights("missing/a.weights.h5")
    except FileNotFoundError:
        said.append("missing")
else:
    made.save_weights("missing/a.weights.h5")
trained(made, epochs=1)
ends(lambda: np.array(kernels[rank]))
time.sleep(4 * rank)
ends(lambda: process_group.wait_for_all() if rank else np.array(kernels[0]))
ends(lambda: made.export("exported"))
ends(lambda: lockstep.verify(made, (X, Y), steps=1))
print("\\nREPORT", json.dumps([said, distance(predicted, one.predict(X, verbose=0))]))
"""


@pytest.mark.whole
def test_a_read_by_one_process_alone_ends_in_words(tmp_path):
    found, _ = run_both(BEGIN + ALONE, tmp_path, LOCKSTEP_PATIENCE="3")
    (said, far), (also_said, also_far) = found
    assert max(far, also_far) <= 1e-10
    alone = [ALONE_READS, ALONE_READS, "missing", BOTH[0], ALONE_READS, *BOTH[1:]]
    assert [words.split("\n")[0] for words in said] == alone
    assert "for process 0, which has ended" in also_said.pop(1)
    assert [words.split("\n")[0] for words in also_said] == BOTH


ALONE_READS = "Process 0 reads a sharded variable, but another process does not."
BOTH = [
    "Two processes read different sharded variables.",
    "'sequential_1' cannot be exported, because its variables are sharded across several "
    "processes.",
    "'sequential_1' cannot be verified with sharded state across several processes:\nverify needs",
]
