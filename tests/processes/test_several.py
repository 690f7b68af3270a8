"""Two processes of two devices train what one device trains, and one of them writes."""

import json
import os
import socket
from pathlib import Path

import keras
import numpy as np
import pytest

import lockstep
from lockstep.errors import CheckpointWarning
from tests.conformance.common import assert_same, compile_, data, model
from tests.processes.common import clean_environment
from tests.processes.warm import Script

HERE = Path(__file__).parents[2]

SCRIPT = """
import json, sys
import lockstep
import jax
rank = int(sys.argv[1])
jax.distributed.initialize(sys.argv[2], 2, rank)
import keras, numpy as np
from lockstep.errors import LockstepError
from tests.conformance.common import compile_, data, model, fit
from tests.conformance.common import snapshot
from tests.processes.test_several import adapted

def report(made, history, **more):
    values = snapshot(made)
    np.savez(f"rank{{rank}}.npz", **{{k.replace("/", "|"): v for k, v in values.items()}})
    print("\\nREPORT", json.dumps({{"history": history, **more}}))

{body}
"""


def run_both(body, folder, **settings):
    """Run a script in two processes; what each of them reported, and printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (folder / "script.py").write_text(SCRIPT.format(body=body))
    clean = clean_environment()
    more = {
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "LOCKSTEP_REHEARSE": "2",
        "KERAS_BACKEND": "jax",
        "OMP_NUM_THREADS": "1",
    }
    path = os.pathsep.join([str(HERE), str(HERE / "src")])
    environment = {**clean, **more, **settings, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
    running = [
        Script(
            ["script.py", str(rank), address],
            folder,
            environment,
            [folder / f"{name}-{rank}.txt" for name in ("printed", "said")],
        )
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (out, error) in zip(running, said, strict=True):
        assert process.returncode == 0, out + error
    found = []
    for out, _ in said:
        (line,) = [line for line in out.splitlines() if line.startswith("REPORT")]
        found.append(json.loads(line.removeprefix("REPORT ")))
    return found, [out for out, _ in said]


def weights_of(folder, rank):
    with np.load(folder / f"rank{rank}.npz") as arrays:
        return {name.replace("|", "/"): arrays[name] for name in arrays}


TRAIN = """
import os, time

made = model(compiled=False, seed=5 if rank == 0 else 99)
lockstep.distribute(made)
compile_(made)
if rank == 0:
    np.random.seed(7)  # the order of rows is that of process 0
stop = keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0, verbose=1)
sums = []

def one_more(*_):
    if rank == 0:  # a file that no other process waits for
        made.save_weights("one-more.weights.h5")
        time.sleep(0.5)

def load(*_):
    made.load_weights("last.weights.h5")
    sums.append(float(sum(np.abs(array).sum() for array in made.get_weights())))

class Opens(keras.callbacks.Callback):
    # As W&B's callback does: each process made a run of its own.

    def __init__(self, name):
        super().__init__()
        self.file = f"{name}-{rank}.run"

    def on_epoch_end(self, epoch, logs=None):
        with open(self.file, "a") as run:
            print(epoch, file=run)

class OfWandb(Opens):
    pass

OfWandb.__module__ = "wandb.integration.keras"

callbacks = [
    stop,
    OfWandb("known"),
    lockstep.first_process(Opens("marked")),
    lockstep.first_process(lambda: Opens(f"made-{lockstep.is_first()}")),
    keras.callbacks.LambdaCallback(on_epoch_end=one_more),
    keras.callbacks.ModelCheckpoint("last.weights.h5", save_weights_only=True, verbose=1),
    keras.callbacks.LambdaCallback(on_epoch_end=load),
    keras.callbacks.ModelCheckpoint("best.keras", monitor="val_loss", save_best_only=True),
    keras.callbacks.ModelCheckpoint(f"of-{rank}.weights.h5", save_weights_only=True),
    keras.callbacks.CSVLogger("log.csv"),
    keras.callbacks.BackupAndRestore("backup"),
]
x, y = data()
history = made.fit(
    x, y, batch_size=7, epochs=4, validation_split=0.2, callbacks=callbacks, verbose=2
).history
evaluated = made.evaluate(x, y, batch_size=9, verbose=0)
predicted = made.predict(x, batch_size=9, verbose=0)
made.save(f"saved-by-{rank}.keras")
report(made, history, evaluated=evaluated, predicted=predicted.tolist(),
       devices=len(jax.devices()), stopped=stop.stopped_epoch, sums=sums)
"""


def test_two_processes_give_what_one_device_gives(tmp_path):
    (first, second), said = run_both(TRAIN, tmp_path)
    assert first["devices"] == 4
    assert first == second
    mine, theirs = weights_of(tmp_path, 0), weights_of(tmp_path, 1)
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)

    one = model(compiled=False, seed=5)
    compile_(one)
    np.random.seed(7)
    x, y = data()
    history = one.fit(x, y, batch_size=7, epochs=2, validation_split=0.2, verbose=0).history
    assert first["stopped"] == 1
    assert_same(first["history"], history)
    assert_same(first["evaluated"], one.evaluate(x, y, batch_size=9, verbose=0))
    assert_same(np.array(first["predicted"]), one.predict(x, batch_size=9, verbose=0))
    weights = [value for name, value in mine.items() if not name.startswith("optimizer/")]
    assert_same(weights[: len(one.variables)], [np.asarray(v.value) for v in one.variables])

    # One of them prints, and one of them writes.
    assert "[Gloo]" not in said[0] + said[1]
    assert "lockstep: jax, 4 devices (cpu:0 to cpu:3" in said[0]  # one was cpu:2048
    assert "Epoch 1/4" in said[0]
    assert "saving model to last.weights.h5" in said[0]
    assert "early stopping" in said[0]
    assert "Epoch" not in said[1]  # in which both callbacks begin what they say
    assert "lockstep:" not in said[1]
    written = {path.name for path in tmp_path.iterdir()}
    assert {"best.keras", "last.weights.h5", "log.csv", "saved-by-0.keras"} <= written
    runs = {name for name in written if name.endswith(".run")}
    assert runs == {"known-0.run", "marked-0.run", "made-True-0.run"}
    assert "saved-by-1.keras" not in written
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3
    read = keras.models.load_model(tmp_path / "saved-by-0.keras")
    assert_same(read.get_weights(), [np.asarray(v.value) for v in one.weights])


PART = """
import os
from lockstep.errors import LockstepError
made = model(compiled=False, seed=5 if rank == 0 else 99)
compile_(made)
lockstep.distribute(made)
x, y = data()

class Cut(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == {stop}:
            raise InterruptedError

    def get_state(self):
        return None

    def set_state(self, state):
        pass

np.random.seed(7 if rank == 0 else 8)
folder = "run" if {shared} or rank == 0 else "another"
saving = [lockstep.Checkpoint(folder, steps=3, background=False)]
saving += [keras.callbacks.CSVLogger("log.csv")]
options = dict(batch_size=7, epochs=4, validation_split=0.2)
history, error = None, ""
try:
    history = made.fit(x, y, **options, callbacks=[*saving, Cut()]).history
except (InterruptedError, LockstepError) as stopped:
    error = type(stopped).__name__
report(made, history, error=error, threads=[t.name for t in __import__("threading").enumerate()])
"""


@pytest.mark.whole
def test_a_run_goes_on_from_two_processes_in_one_and_back(tmp_path, monkeypatch):
    """Cut after 8 steps of 24, within the second epoch, and again after 15, within the third."""
    one = model(compiled=False, seed=5)
    compile_(one)
    np.random.seed(7)
    x, y = data()
    options = {"batch_size": 7, "epochs": 4, "validation_split": 0.2, "verbose": 0}
    history = one.fit(x, y, **options).history

    (first, second), said = run_both(PART.format(stop=8, shared=True), tmp_path)
    assert first["error"] == second["error"] == "InterruptedError"
    assert "lockstep: resumes" not in said[0] + said[1]
    assert not any("checkpoint" in name for name in first["threads"])

    class Cut(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations == 15:
                raise InterruptedError

        def get_state(self):
            return None

        def set_state(self, state):
            pass

    monkeypatch.chdir(tmp_path)
    alone = model(compiled=False, seed=77)
    compile_(alone)
    lockstep.distribute(alone, 3)
    logger = keras.callbacks.CSVLogger("log.csv")
    with pytest.raises(InterruptedError):
        alone.fit(
            x,
            y,
            **options,
            callbacks=[lockstep.Checkpoint("run", steps=3, background=False), logger, Cut()],
        )
    logger.csv_file.close()  # which Keras leaves open

    found, said = run_both(PART.format(stop=-1, shared=True), tmp_path)
    assert "epoch 2, after step 6; 3 devices then, 4 now" in said[0]
    assert "lockstep" not in said[1]
    for each in found:
        assert_same(each["history"], history)
    mine, theirs = weights_of(tmp_path, 0), weights_of(tmp_path, 1)
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
    weights = [value for name, value in mine.items() if not name.startswith("optimizer/")]
    assert_same(weights[: len(one.variables)], [np.asarray(v.value) for v in one.variables])
    # Each start appends; an epoch that is trained again, as its end was not saved, has two rows.
    head, *rows = (tmp_path / "log.csv").read_text().splitlines()
    assert head not in rows
    assert {row.split(",")[0] for row in rows} == {"0", "1", "2", "3"}


TOLD = """
import os, signal, time
made = model(compiled=False, seed=5)
compile_(made)
lockstep.distribute(made)
x, y = data()

class Told(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)
        if rank == 1 and self.model.optimizer.iterations == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    def get_state(self):
        return None

    def set_state(self, state):
        pass

np.random.seed(7)
history, code = None, 0
try:
    history = made.fit(
        x, y, batch_size=7, epochs=15, callbacks=[lockstep.Checkpoint("run", steps=10**6), Told()]
    ).history
except SystemExit as left:
    code = left.code
report(made, history, code=code, done=int(made.optimizer.iterations))
"""


def test_sigterm_to_one_process_saves_and_ends_all_after_the_same_step(tmp_path, capsys):
    found, _ = run_both(TOLD, tmp_path)
    assert [each["code"] for each in found] == [143, 143]
    assert 9 < found[0]["done"] == found[1]["done"] < 15 * 8
    (saved,) = (tmp_path / "run").glob("0*")
    _, _, epochs, _, steps = saved.name.split("-")  # after the last step of an epoch, that is 8
    assert int(epochs) * 8 + int(steps) == found[0]["done"]

    x, y = data()
    options = {"batch_size": 7, "epochs": 15}
    alone = lockstep.distribute(model(seed=77), 3)
    saving = lockstep.Checkpoint(tmp_path / "run")
    with pytest.warns(CheckpointWarning, match="Told is in the checkpoint, but not in this fit"):
        history = alone.fit(x, y, **options, verbose=2, callbacks=[saving]).history
    assert "lockstep: resumes from" in capsys.readouterr().out
    one = model(compiled=False, seed=5)
    compile_(one)
    np.random.seed(7)
    assert_same(history, one.fit(x, y, **options, verbose=0).history)


LATER = """
made = model(compiled=False, built=False, seed=5 if rank == 0 else 99)
lockstep.distribute(made)
compile_(made)
x, y = data()
made.fit(x, y, batch_size=7, verbose=0, shuffle=False)
logs = [made.train_on_batch(x[:5], y[:5]), made.test_on_batch(x[:3], y[:3])]
one = made.predict_on_batch(x[:3])
direct = np.asarray(made(x[:3]))
weights = made.get_weights()
weights[0] = weights[0] * 2
if rank == 0:  # weights are those of the first process
    made.set_weights(weights)
history = made.fit(x, y, batch_size=7, verbose=0, shuffle=False, steps_per_epoch=3).history
made.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", steps_per_execution=3)
history["at once"] = made.fit(x, y, batch_size=7, verbose=0, shuffle=False).history["loss"]
made.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")
# More steps than JAX has under way at once, and nothing that waits for them.
history["many"] = made.fit(*data(400), batch_size=4, verbose=0, shuffle=False).history["loss"]
lockstep.release(made)

class Own(keras.Model):
    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)

    def evaluate(self, *args, **kwargs):
        return super().evaluate(*args, **kwargs)

    def predict(self, *args, **kwargs):
        return super().predict(*args, **kwargs)

inner = model(compiled=False, seed=5)
own = Own(inner.inputs, inner.outputs)
compile_(own)
lockstep.distribute(own)
writing = [keras.callbacks.CSVLogger("own.csv"), keras.callbacks.BackupAndRestore("own")]
own.fit(x, y, batch_size=7, shuffle=False, epochs=2, verbose=2, callbacks=writing)
history["own"] = [float(loss) for loss in own.history.history["loss"]]
by_place = keras.callbacks.CSVLogger("by_place.csv")
history["by place"] = own.fit(x, y, 7, 1, 2, [by_place], shuffle=False).history["loss"]
history["by place"] += [own.evaluate(x, y, 9, 2), *own.predict(x, 9, 2)[:, 0].tolist()]

class OnPairs(keras.Model):
    def fit(self, pair, epochs):
        logger = keras.callbacks.CSVLogger(f"pairs-{rank}.csv")
        return super().fit(*pair, batch_size=7, epochs=epochs, shuffle=False, callbacks=[logger])

on_pairs = OnPairs(inner.inputs, inner.outputs)
compile_(on_pairs)
lockstep.distribute(on_pairs)
history["on pairs"] = on_pairs.fit((x, y), 2).history["loss"]

failed = lockstep.distribute(model())
try:  # an error in one process alone, before it has built what the other one has
    failed.fit(x, y[: len(y) - rank], batch_size=7, verbose=0)
except (ValueError, LockstepError) as error:
    errors = [type(error).__name__]
history["failed"] = failed.fit(x, y, batch_size=7, verbose=0, shuffle=False).history["loss"]
mesh = jax.sharding.Mesh(np.array(jax.devices()), "rows")
layout = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
apart = jax.make_array_from_callback((8, 4), layout, lambda rows: x[:8][rows])
try:  # process 1 has said what it has assigned, and process 0 has not yet
    failed.evaluate(x[:8] if rank else apart, y[:8], verbose=0)
except LockstepError as error:
    errors += [type(error).__name__]
if rank == 1:
    failed.optimizer.learning_rate = 0.5
    __import__("time").sleep(2)
history["said"] = failed.fit(x, y, batch_size=7, verbose=0, shuffle=False).history["loss"]

wide = adapted(x, rank == 0)  # by the first process alone
lockstep.distribute(wide)
history["adapted"] = wide.fit(x, y, batch_size=7, verbose=0, shuffle=False).history["loss"]
wide.layers[0].adapt(x * (1 + rank))
kernel = np.array(wide.layers[1].kernel)
kernel[0, 1] += rank  # not among the numbers that are compared before each step
wide.layers[1].kernel.assign(kernel)
history["assigned"] = wide.fit(x, y, batch_size=7, verbose=0, shuffle=False).history["loss"]

unseeded = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
unseeded.layers[0].kernel.assign(np.full((4, 2), 1.0 + rank))
unseeded.compile("sgd", "mse")
verified = lockstep.verify(unseeded, (x, y), steps=2, batch_size=7)
zero = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
rounding = keras.Sequential([keras.Input((4,)), *zero])  # the gradient of the first bias
rounding.compile(keras.optimizers.Adam(0.05), "mse")
unknown = lockstep.verify(rounding, (x, y), batch_size=7)
report(made, history, logs=logs, predicted=np.asarray(one).tolist(), direct=direct.tolist(),
       errors=errors, wide=np.asarray(wide(x[:3])).tolist(), verified=verified.equal,
       unknown=[unknown.verdict, unknown.cause],
       left=np.unique(unseeded.layers[0].kernel).tolist())
"""


def adapted(x, by_this_process=True):
    """A model that computes with statistics of its data, and has more than 64 KiB in a variable."""
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Normalization(), keras.layers.Dense(6000), keras.layers.Dense(2)]
    made = keras.Sequential([keras.Input((4,)), *layers])
    made.compile(keras.optimizers.SGD(1e-5), "mse")
    if by_this_process:
        made.layers[0].adapt(x * 3 + 1)
    return made


@pytest.mark.whole
def test_a_model_built_later_and_every_other_call(tmp_path):
    (first, second), said = run_both(LATER, tmp_path)
    assert first.pop("errors") == ["ProcessesDisagree", "ProcessesDisagree"]
    assert second.pop("errors") == ["ValueError", "ProcessesDisagree"]  # Keras's, of other rows
    assert first.pop("left") == [1.0]  # verify leaves weights as they were
    assert second.pop("left") == [2.0]
    assert first == second
    assert first["verified"]
    assert first["unknown"][0] == "cannot tell"
    assert "float64 comparison does not run under a launcher with several" in first["unknown"][1]
    assert "Epoch 2/2" in said[0]
    assert "Epoch" not in said[1]
    assert "lockstep:" not in said[1]
    assert len((tmp_path / "own.csv").read_text().splitlines()) == 3
    assert len((tmp_path / "pairs-0.csv").read_text().splitlines()) == 3
    assert not (tmp_path / "pairs-1.csv").exists()
    assert "6/6" in said[0]
    assert "6/6" not in said[1]
    one = model(compiled=False, built=False, seed=5)
    compile_(one)
    x, y = data()
    one.fit(x, y, batch_size=7, verbose=0, shuffle=False)
    assert_same(first["logs"][0], one.train_on_batch(x[:5], y[:5]))
    assert_same(first["logs"][1], one.test_on_batch(x[:3], y[:3]))
    assert_same(np.array(first["predicted"]), one.predict_on_batch(x[:3]))
    assert_same(np.array(first["direct"]), np.asarray(one(x[:3])))
    weights = one.get_weights()
    weights[0] = weights[0] * 2
    one.set_weights(weights)
    history = one.fit(x, y, batch_size=7, verbose=0, shuffle=False, steps_per_epoch=3).history
    one.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")
    history["at once"] = one.fit(x, y, batch_size=7, verbose=0, shuffle=False).history["loss"]
    one.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")
    many = one.fit(*data(400), batch_size=4, verbose=0, shuffle=False).history
    history["many"] = many["loss"]
    own = model(compiled=False, seed=5)
    compile_(own)
    own.fit(x, y, batch_size=7, shuffle=False, epochs=2, verbose=0)
    history["own"] = own.history.history["loss"]
    history["by place"] = own.fit(x, y, 7, 1, 0, shuffle=False).history["loss"]
    history["by place"] += [own.evaluate(x, y, 9, 0), *own.predict(x, 9, 0)[:, 0].tolist()]
    compile_(own)
    own.fit(x, y, batch_size=7, shuffle=False, epochs=2, verbose=0)
    history["on pairs"] = own.history.history["loss"]
    failed = model()
    history["failed"] = failed.fit(x, y, batch_size=7, shuffle=False, verbose=0).history["loss"]
    history["said"] = failed.fit(x, y, batch_size=7, shuffle=False, verbose=0).history["loss"]
    wide = adapted(x)
    history["adapted"] = wide.fit(x, y, batch_size=7, shuffle=False, verbose=0).history["loss"]
    wide.layers[0].adapt(x)
    history["assigned"] = wide.fit(x, y, batch_size=7, shuffle=False, verbose=0).history["loss"]
    assert_same(first["history"], history)
    assert_same(np.array(first["wide"]), np.asarray(wide(x[:3])))


REFUSED = {
    "other rows": (
        "x, y = data(); made.fit(x + rank, y, batch_size=7, verbose=0)",
        "Process 1 has a different first batch",
    ),
    "one late row of a batch that is trained on": (
        "made.train_on_batch(*late())",
        "Process 1 has a different batch than process 0 in the data of its train_on_batch",
    ),
    "one late row of a batch that is tested on": (
        "made.test_on_batch(*late())",
        "Process 1 has a different batch than process 0 in the data of its test_on_batch",
    ),
    "one late row of a batch that is predicted": (
        "made.predict_on_batch(late()[0])",
        "Process 1 has a different batch than process 0 in the data of its predict_on_batch",
    ),
    "one late row in a fit of its own": (
        "own = Own(made.inputs, made.outputs); own.compile('sgd', 'mse'); "
        "lockstep.distribute(own).fit(*late(), batch_size=20_000, verbose=0)",
        "Process 1 has a different batch than process 0 in the training data of its fit",
    ),
    "one late row in a validation of its own": (
        "own = Own(made.inputs, made.outputs); own.compile('sgd', 'mse'); "
        "lockstep.distribute(own).fit(*data(), verbose=0, validation_data=late(), "
        "validation_batch_size=20_000)",
        "Process 1 has a different batch than process 0 in the validation data of its fit",
    ),
    "another validation": (
        "x, y = data(); made.fit(x, y, verbose=0, validation_data=(x + rank, y))",
        "Process 1 has a different first batch, or a different number of batches or rows, than "
        "process 0,\n"
        "in the validation data of its fit",
    ),
    "other steps_per_epoch": (
        "x, y = data(); made.fit(x, y, batch_size=7, verbose=0, steps_per_epoch=3 + rank)",
        "Process 1 was given steps_per_epoch=4, but process 0 steps_per_epoch=3",
    ),
    "other validation_steps": (
        "x, y = data(); made.fit(x, y, batch_size=7, verbose=0, validation_data=(x, y), "
        "validation_steps=[None, 3][rank])",
        "Process 1 was given validation_steps=3, but process 0 validation_steps=None",
    ),
    "another number of batches": (
        "x, y = data(53 - 14 * rank); made.fit(x, y, batch_size=7, verbose=0, shuffle=False)",
        "a different number of batches",
    ),
    "another batch later on": (
        "x, y = data(); x[40] += rank; made.fit(x, y, batch_size=7, verbose=0, shuffle=False)",
        "In one of the 8 batches of this epoch, process 1 had different rows than process 0",
    ),
    "another batch of a validation": (
        "x, y = data(); x[20] += rank; made.evaluate(x, y, batch_size=7, verbose=0)",
        "In one of the 8 batches of this epoch, process 1 had different rows than process 0",
    ),
    "other rows in the last batch": (
        "x, y = data(55); rows = 53 + 2 * rank; "
        "made.fit(x[:rows], y[:rows], batch_size=7, verbose=0, shuffle=False)",
        "Process 1 has a different first batch, or a different number of batches or rows",
    ),
    "a later batch of another shape": (
        "x, y = data(); batches = ((x[: 7 - i * rank], y[: 7 - i * rank]) for i in range(3)); "
        "made.fit(batches, verbose=0)",
        "Process 1 has different shapes or types than process 0 in batch 2 of its epoch",
    ),
    "a rate that one process assigns": (
        "x, y = data(); made.fit(x, y, batch_size=7, verbose=0, shuffle=False, epochs=2, "
        "callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=assigned)])",
        "Process 1 has assigned different values to variables than process 0",
    ),
    "weights that one process assigns before a batch": (
        "x, y = data(); made.train_on_batch(x, y); assigned(); made.train_on_batch(x, y)",
        "Process 1 has assigned different values to variables than process 0",
    ),
    "other checkpoints": (
        "x, y = data(); saved = lambda name: made.fit(x, y, batch_size=7, verbose=0, "
        "callbacks=[lockstep.Checkpoint(name)]); saved('run'); saved('run' if rank else 'none')",
        "but another from None:\nthey do not see the same folder",
    ),
    "validation in one process": (
        "x, y = data(); made.fit(x, y, batch_size=7, epochs=2, verbose=0, "
        "validation_data=None if rank else (x, y))",
        "Process 0 was given validation data for its fit, but process 1 none",
    ),
    "validation at other epochs": (
        "x, y = data(); made.fit(x, y, batch_size=7, epochs=2, verbose=0, "
        "validation_split=0.2, validation_freq=1 + rank)",
        "Process 1 was given validation_freq=2, but process 0 1: they would",
    ),
    "a checkpoint in one process": (
        "made.fit(*data(), batch_size=7, verbose=0, "
        "callbacks=[lockstep.Checkpoint('alone')] if rank else None)",
        "Process 1 was given a lockstep.Checkpoint for its fit, but process 0 none",
    ),
    "a checkpoint of Orbax's": (
        "made.fit(*data(), batch_size=7, verbose=0, "
        "callbacks=[keras.callbacks.OrbaxCheckpoint(os.path.abspath('orbax'))])",
        "OrbaxCheckpoint was given, but several processes train",
    ),
    "a checkpoint of Orbax's in a fit of its own": (
        "own = Saving(made.inputs, made.outputs); own.compile('sgd', 'mse'); "
        "lockstep.distribute(own).fit(*data(), batch_size=7, verbose=0)",
        "OrbaxCheckpoint was given, but several processes train",
    ),
    "operation by operation": (
        "made.compile('sgd', 'mse', run_eagerly=True); made.fit(*data(), verbose=0)",
        "run_eagerly or jit_compile=False was requested",
    ),
    "a layer that Keras does not compile": (
        "cut = keras.Sequential([keras.layers.RandomCrop(2, 2, name='cut'), "
        "keras.layers.GlobalAveragePooling2D()]); cut.compile('sgd', 'mse'); "
        "x = np.zeros((8, 4, 4, 1)); lockstep.distribute(cut).fit(x, x[:, 0, 0], verbose=0)",
        "Keras cannot compile cut (RandomCrop)",
    ),
    "rows that are masked out": (
        "x, y = data(); made.fit(np.ma.masked_array(x, x > 1), y, batch_size=7, verbose=0)",
        "numpy masked arrays are not supported",
    ),
    "arrays that no process has whole": (
        "made.fit(*map(spread, data(56)), batch_size=7, verbose=0)",
        "sharded across processes, and no process has all of it",
    ),
    "batches that no process has whole": (
        "made.fit((tuple(map(spread, data(8))) for _ in range(3)), verbose=0)",
        "sharded across processes, and no process has all of it",
    ),
    "one batch that no process has whole": (
        "made.train_on_batch(*map(spread, data(8)))",
        "sharded across processes, and no process has all of it",
    ),
    "another metric": (
        "made.compile('sgd', 'mse', metrics=['mae'][:rank]); made.fit(*data(), verbose=0)",
        "Process 1 has 6 variables",
    ),
    "another momentum": (
        "made.compile(keras.optimizers.SGD(0.1, 0.8 + rank / 10), 'mse'); "
        "made.fit(*data(), verbose=0)",
        "Process 1 would run a different step than process 0",
    ),
    "a difference the other way round": (
        "whole = keras.Input((4,)); pair = [whole[:, :2], whole[:, 2:]][:: 1 - 2 * rank]; "
        "ends = keras.layers.Dense(2)(keras.ops.subtract(*pair)); made = keras.Model(whole, ends); "
        "made.compile('sgd', 'mse'); lockstep.distribute(made).fit(*data(), verbose=0)",
        "Process 1 would run a different step than process 0",
    ),
    "another type within a layer": (
        "half = keras.layers.Dense(2, dtype=['mixed_bfloat16', 'mixed_float16'][rank]); "
        "made = keras.Sequential([keras.Input((4,)), half]); made.compile('sgd', 'mse'); "
        "lockstep.distribute(made).fit(*data(), verbose=0)",
        "Process 1 would run a different step than process 0",
    ),
    "another precision of an operation": (
        "exact = ['default', 'highest'][rank]; times = lambda x: jax.numpy.matmul(x, x.T, "
        "precision=exact); made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), "
        "keras.layers.Lambda(times)]); made.compile('sgd', 'mse'); "
        "lockstep.distribute(made).fit(*data(8), batch_size=2, verbose=0)",
        "Process 1 would run a different step than process 0",
    ),
    "another layer": (
        "lockstep.distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2 + rank)]))",
        "Process 1 has 2 variables with 15 numbers, but process 0 has 2 with 10",
    ),
    "another order of devices": (
        "lockstep.distribute(made, lockstep.devices()[:: 1 - 2 * rank])",
        "Process 1 lists the devices in a different order than process 0",
    ),
    "some of the devices": (
        "lockstep.distribute(made, 2)",
        "devices=2 was requested, but 2 processes have 4",
    ),
}


REFUSING = """
import os
from tests.processes.test_several import REFUSED
errors = {}

def assigned(*_):
    if rank:
        made.optimizer.learning_rate = 0.5

def spread(array):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "rows")
    layout = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    return jax.make_array_from_callback(array.shape, layout, lambda rows: array[rows])

def late():
    x, y = data(20_000)
    x[19_000, 1] += rank  # behind the first rows, and not among those of a sample
    return x, y

class Own(keras.Model):
    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)

class Saving(keras.Model):
    def fit(self, *args, **kwargs):
        saving = keras.callbacks.OrbaxCheckpoint(os.path.abspath("orbax"))
        return super().fit(*args, **kwargs, callbacks=[saving])

for case, (call, _) in REFUSED.items():
    made = lockstep.distribute(model())
    try:
        exec(call)
    except (LockstepError, ValueError) as error:
        errors[case] = str(error)

made = lockstep.distribute(model())
x, y = data()
history = made.fit(x, y, batch_size=8, verbose=0).history
report(made, history, errors=errors)
"""


def test_processes_that_would_not_train_one_model_are_told(tmp_path):
    reports, _ = run_both(REFUSING, tmp_path)
    for report in reports:
        assert report["errors"].keys() == REFUSED.keys()
        for case, (_, text) in REFUSED.items():
            assert text in report["errors"][case]
    assert reports[0]["history"] == reports[1]["history"]


SHUFFLED = """
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7 + rank)  # the order of rows is that of process 0
x, y = data()
made = lockstep.distribute(model())
loader = DataLoader(TensorDataset(*map(torch.from_numpy, (x, y))), batch_size=7, shuffle=True)
losses = [made.fit(loader, shuffle=False, epochs=2, verbose=0).history["loss"] for _ in range(2)]
report(made, losses)
"""


def test_a_loader_that_pytorch_shuffles_has_the_order_of_the_first_process(tmp_path):
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    (first, second), _ = run_both(SHUFFLED, tmp_path)
    assert first == second
    torch.manual_seed(7)
    one = model()
    pairs = TensorDataset(*map(torch.from_numpy, data()))
    loader = DataLoader(pairs, batch_size=7, shuffle=True)
    for losses in first["history"]:
        alone = one.fit(loader, shuffle=False, epochs=2, verbose=0).history["loss"]
        assert_same(losses, alone)


LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("call", ["distribute", "initialize"])
def test_processes_that_jax_cannot_join_any_more_are_told(monkeypatch, call):
    import lockstep
    from lockstep.errors import ProcessesDisagree

    made = model()  # starts JAX
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    text = r"process 1 of 4 \(torchrun: RANK, .*, but JAX started its devices before the processes"
    with pytest.raises(ProcessesDisagree, match=text) as said:
        lockstep.distribute(made, 2) if call == "distribute" else lockstep.initialize()
    assert "before lockstep was imported" in str(said.value)
    assert len(str(said.value).splitlines()) == 3
    monkeypatch.setenv("LOCKSTEP_PROCESSES", "1")  # a training apart
    assert lockstep.initialize() == (0, 1)
    lockstep.release(lockstep.distribute(made, 2))


def test_a_process_that_a_process_of_the_run_starts_is_none_of_the_run(monkeypatch):
    """It has the variables of the launcher, and would join as the same process a second time."""
    import lockstep

    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCKSTEP_JOINED", str(os.getpid() + 1))
    assert lockstep.initialize() == (0, 1)


def test_processes_of_mpich_that_jax_does_not_know_of_are_warned(monkeypatch):
    import lockstep
    from lockstep.errors import LockstepWarning

    monkeypatch.setenv("PMI_SIZE", "1")
    made = lockstep.distribute(model(), 2)  # without a word
    lockstep.release(made)
    monkeypatch.setenv("PMI_SIZE", "3")
    with pytest.warns(LockstepWarning, match="PMI_SIZE=3 processes were started, but JAX") as said:
        lockstep.distribute(made, 2)
    assert said[0].filename == __file__
    made.predict(np.ones((4, *made.input_shape[1:]), "float32"), verbose=0)  # and goes on


def test_processes_that_jax_knows_of_are_not_warned(monkeypatch):
    from lockstep.engines.jax.processes import jax_group

    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setattr(jax_group.jax, "process_count", lambda: 2)
    jax_group.check_started()  # a warning would be an error


def test_processes_with_more_devices_than_others_are_told(monkeypatch):
    """JAX could not lay its broadcast out, and said so in terms of its own."""
    from unittest.mock import Mock

    import jax

    from lockstep.engines.jax.processes import jax_group
    from lockstep.errors import ProcessesDisagree

    devices = [Mock(process_index=index, platform="gpu") for index in (0, 0, 1)]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "devices", lambda platform: devices)
    with pytest.raises(ProcessesDisagree, match="Process 0 has 2 devices, but process 1 has 1"):
        jax_group.check_devices(devices)


def test_cpus_of_a_host_whose_name_has_no_address_are_told_what_to_add(monkeypatch):
    """JAX has Gloo's text: "enforce fail at ... device.cc:99] rv == 0. -2 vs 0"."""
    import socket

    from lockstep.core.environment import Place
    from lockstep.engines.jax.processes import joining
    from lockstep.errors import ProcessesDisagree

    def gloo():
        raise RuntimeError("[enforce fail at external/gloo/gloo/transport/tcp/device.cc:99]")

    def unknown(*_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(joining.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(joining.xla_bridge, "backends", gloo)
    monkeypatch.setattr(joining, "_is_joined", lambda: True)
    monkeypatch.setattr(joining.socket, "gethostname", lambda: "nowhere")
    joining.at_first_use(Place(rank=1, size=2), lambda: None)
    with monkeypatch.context() as within:
        within.setattr(joining.socket, "getaddrinfo", unknown)
        with pytest.raises(ProcessesDisagree) as raised:
            joining.xla_bridge.backends()
    assert "the CPUs of 2 processes by host name, but the name of this host" in str(raised.value)
    assert "Add a line to /etc/hosts with the network address of this host, and nowhere." in str(
        raised.value
    )
    assert len(str(raised.value).splitlines()) == 3
