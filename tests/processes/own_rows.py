"""What every process of a run with rows of its own does: `lockstep run` starts this file.

Each case trains a model on rows of each process, and compares with stock Keras on one device that
is given the joined batches, made here by hand. The first process writes the distances into a file.
"""

import itertools
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import keras
import numpy as np
from keras import layers

import lockstep
from lockstep.errors import LockstepError
from lockstep.keras_compat import compute_in_float64
from lockstep.processes.group import current
from lockstep.training import predictions

rank, size = lockstep.initialize()
compute_in_float64()
RNG = np.random.default_rng(4)
X, Y = RNG.normal(size=(90, 6)), RNG.normal(size=(90, 2))
W = RNG.uniform(0.2, 2.0, size=90)


def batches_of(process, rows, steps=(6, 4, 5), tensors=(X, Y)):
    """Batches of a process: `rows` of each step, and `steps` of them."""
    start = sum(rows[r] * steps[r] for r in range(process))
    cuts = range(start, start + rows[process] * steps[process], max(1, rows[process]))
    return [tuple(each[cut : cut + rows[process]] for each in tensors) for cut in cuts]


def joined(every):
    """The global batches: rows of the k-th batch of every process, in order of the ranks."""
    found = []
    for number in range(max(map(len, every))):
        parts = [batches[number] for batches in every if number < len(batches)]
        found.append(keras.tree.map_structure(lambda *each: np.concatenate(each), *parts))
    return found


def dense(**given):
    keras.utils.set_random_seed(3)
    made = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dense(2),
        ]
    )
    given = {"loss": "mse", "metrics": ["mae"], "weighted_metrics": ["mse"], **given}
    # A rate at which rounding does not grow: batches of one row go through the batch norm.
    made.compile(keras.optimizers.SGD(0.02, momentum=0.9), **given)
    return made


def masked():
    keras.utils.set_random_seed(3)
    one, two = keras.Input((5,), name="words", dtype="int32"), keras.Input((6,), name="numbers")
    read = layers.GRU(4)(layers.Embedding(9, 3, mask_zero=True)(one))
    merged = layers.Dense(2)(layers.concatenate([read, layers.LayerNormalization()(two)]))
    made = keras.Model({"words": one, "numbers": two}, merged)
    made.compile("adam", "mse", metrics=["mae"])
    return made


def dense_of_layers():
    keras.utils.set_random_seed(3)
    made = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(2)]
    )
    made.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    return made


def wide():
    keras.utils.set_random_seed(3)
    made = keras.Sequential(
        [keras.Input((6,)), layers.Dense(1536, activation="tanh"), layers.Dense(2)]
    )
    made.compile("adam", "mse")
    return made


def stateful():
    """Its state goes on from step to step, for each row of the global batch."""
    keras.utils.set_random_seed(3)
    made = keras.Sequential(
        [
            keras.Input((3, 2), batch_size=4 * size),
            layers.GRU(3, stateful=True),
            layers.Dense(2),
        ]
    )
    made.compile("sgd", "mse")
    return made


def in_time(every):
    return [[(x.reshape(-1, 3, 2), y) for x, y in batches] for batches in every]


class ItsOwnFit(keras.Sequential):
    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)


def its_own_fit():
    keras.utils.set_random_seed(3)
    made = ItsOwnFit([keras.Input((6,)), layers.Dense(2)])
    made.compile("sgd", "mse")
    return made


class Sequence(keras.utils.PyDataset):
    def __init__(self, batches, **given):
        super().__init__(**given)
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def loader(batches):
    import torch

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return sum(len(batch[0]) for batch in batches)

        def __getitem__(self, row):
            return tuple(np.concatenate(each)[row] for each in zip(*batches, strict=True))

    return torch.utils.data.DataLoader(Rows(), batch_size=len(batches[0][0]))


def dataset(batches):
    import tensorflow as tf

    parts = [np.concatenate(each) for each in zip(*batches, strict=True)]
    return tf.data.Dataset.from_tensor_slices(tuple(parts)).batch(len(batches[0][0]))


class Pairs:
    def __init__(self, batches):
        self.pairs = list(
            zip(*(np.concatenate(e) for e in zip(*batches, strict=True)), strict=True)
        )

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, row):
        return self.pairs[row]


def of_grain(batches):
    import grain

    return grain.MapDataset.source(Pairs(batches)).to_iter_dataset().batch(len(batches[0][0]))


def one_pass(batches):
    yield from batches


def distance(a, b):
    pairs = zip(keras.tree.flatten(a), keras.tree.flatten(b), strict=True)
    read = keras.ops.convert_to_numpy
    return max(float(np.max(np.abs(read(p) - read(q)), initial=0.0)) for p, q in pairs)


def state(made):
    slots = made.optimizer.variables
    return [keras.ops.convert_to_numpy(each.value) for each in [*made.variables, *slots]]


def compared(build, wrap, every, epochs=2, held_out=None, options=None, **given):
    """Train by `fit`, evaluate and predict; return the distance from one device."""
    # Keras alone loses the state of an RNN on JAX: plain data in all processes are the truth there.
    plain = lockstep.distribute(build()) if build is stateful else build()
    whole = joined(every)
    more, of_truth = {}, {}
    if held_out is not None:
        more["validation_data"] = lockstep.process_local(wrap(held_out[rank]))
        of_truth["validation_data"] = Sequence(joined(held_out))
    truth = plain.fit(Sequence(whole), epochs=epochs, shuffle=False, verbose=0, **of_truth, **given)
    made = lockstep.distribute(build(), **(options or {}))
    own = lockstep.process_local(wrap(every[rank]))
    found = made.fit(own, epochs=epochs, shuffle=False, verbose=0, **more, **given)
    pairs = [(found.history, truth.history)]
    if build is stateful:  # `predict` would need rows of all processes
        weights = [[each.value for each in model.trainable_variables] for model in (made, plain)]
        return max(distance(*weights), distance(*pairs[0]))
    lockstep.release(made)  # of a state in shards, too, each process has all now
    pairs += [(state(made), state(plain))]
    lockstep.distribute(made, **(options or {}))
    own = lockstep.process_local(wrap(every[rank]))
    pairs += [(made.evaluate(own, verbose=0), plain.evaluate(Sequence(whole), verbose=0))]
    own = lockstep.process_local(wrap(every[rank]))
    mine = made.predict(own, verbose=0)
    if every[rank]:
        rows = keras.tree.map_structure(lambda *e: np.concatenate(e), *every[rank])
        pairs += [(mine, plain.predict(rows[0], verbose=0))]
    else:
        assert len(mine) == 0, mine.shape
    return max(distance(*pair) for pair in pairs)


def of_all(rows, steps=(6, 4, 5), **given):
    return [batches_of(process, rows, steps, **given) for process in range(size)]


def words(every):
    """The same rows, in a dict of two inputs."""
    return [
        [({"words": np.abs(x[:, :5] * 4).astype("int32") % 9, "numbers": x}, y) for x, y in batches]
        for batches in every
    ]


def say(**found):
    with open(f"reports-{rank}.txt", "a") as file:
        print(json.dumps(found), file=file)


CASES = {
    "even": lambda: compared(dense, Sequence, of_all((4, 4, 4), (5, 5, 5))),
    "one ends early": lambda: compared(dense, Sequence, of_all((4, 3, 2))),
    "no rows from the start": lambda: compared(dense, Sequence, of_all((4, 3, 2), (6, 0, 5))),
    "the first has no rows": lambda: compared(dense, one_pass, of_all((4, 3, 2), (0, 6, 5)), 1),
    "tf.data": lambda: compared(dense, dataset, of_all((4, 3, 2))),
    "DataLoader": lambda: compared(dense, loader, of_all((4, 3, 2))),
    "Grain": lambda: compared(dense, of_grain, of_all((4, 3, 2))),
    "generator": lambda: compared(dense, one_pass, of_all((4, 3, 2)), 1),
    "function": lambda: compared(dense, lambda b: lambda: iter(b), of_all((4, 3, 2))),
    "workers": lambda: compared(
        dense, lambda b: Sequence(b, workers=2, max_queue_size=3), of_all((4, 3, 2))
    ),
    "sample weights": lambda: compared(dense, Sequence, of_all((4, 3, 2), tensors=(X, Y, W))),
    "masks and dict inputs": lambda: compared(masked, Sequence, words(of_all((4, 3, 2)))),
    "validation": lambda: compared(
        dense, Sequence, of_all((4, 3, 2)), held_out=of_all((3, 5, 2), (4, 2, 3))
    ),
    "micro-batches": lambda: compared(
        dense_of_layers, Sequence, of_all((4, 3, 2)), options={"micro_batch_size": 2}
    ),
    "sharded state": lambda: compared(
        wide, Sequence, of_all((4, 3, 2)), options={"state": "sharded"}
    ),
    "a stateful RNN": lambda: compared(
        stateful, Sequence, in_time(of_all((4, 4, 4), (5, 5, 5))), 1
    ),
    "its own fit": lambda: compared(its_own_fit, Sequence, of_all((4, 3, 2))),
    "several steps at once": lambda: compared(
        lambda: dense(steps_per_execution=3), Sequence, of_all((4, 4, 4), (6, 6, 6))
    ),
}


def arrays():
    """`batch_size` of arrays is that of the global batch: shares of 4 and 3, or 3, 2 and 2."""
    shares = [7 // size + (process < 7 % size) for process in range(size)]
    lengths = (20, 25, 11)[:size]
    starts = np.cumsum([0, *lengths])
    parts = [(X[a:b], Y[a:b], W[a:b]) for a, b in itertools.pairwise(starts)]
    every = [
        [tuple(each[cut : cut + share] for each in part) for cut in range(0, len(part[0]), share)]
        for part, share in zip(parts, shares, strict=True)
    ]
    plain, made = dense(), lockstep.distribute(dense())
    truth = plain.fit(Sequence(joined(every)), epochs=2, shuffle=False, verbose=0)
    own = lockstep.process_local(parts[rank])
    found = made.fit(own, batch_size=7, epochs=2, shuffle=False, verbose=0)
    mine = made.predict(lockstep.process_local(parts[rank][0]), batch_size=7, verbose=0)
    theirs = plain.predict(parts[rank][0], verbose=0)
    return max(
        distance(state(made), state(plain)),
        distance(found.history, truth.history),
        distance(mine, theirs),
    )


def class_weights():
    """Sparse targets with a weight for each class, in a `PyDataset`."""

    def build():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return dense(loss=loss, metrics=[], weighted_metrics=[])

    every = [
        [(x, (y[:, 0] > 0).astype("int64")) for x, y in batches] for batches in of_all((4, 3, 2))
    ]
    weights = {0: 0.4, 1: 3.0}
    plain, made = build(), lockstep.distribute(build())
    given = {"epochs": 2, "class_weight": weights, "shuffle": False, "verbose": 0}
    truth = plain.fit(Sequence(joined(every)), **given)
    found = made.fit(lockstep.process_local(Sequence(every[rank])), **given)
    return max(distance(state(made), state(plain)), distance(found.history, truth.history))


def steps():
    """With steps, a process that has ended has no rows until the end of the epoch."""
    every = of_all((4, 3, 2), (8, 3, 5))
    total, per_epoch = 8, 4
    stream, places = [], [0] * size
    for step in range(total):
        parts = []
        for process in range(size):
            if step % per_epoch == 0 and places[process] == len(every[process]):
                places[process] = 0
            if places[process] < len(every[process]):
                parts.append(every[process][places[process]])
                places[process] += 1
        stream.append(tuple(np.concatenate(each) for each in zip(*parts, strict=True)))
    plain, made = dense(), lockstep.distribute(dense())
    for x, y in stream:
        plain.train_on_batch(x, y)
    own = lockstep.process_local(Sequence(every[rank]))
    made.fit(own, epochs=2, steps_per_epoch=per_epoch, shuffle=False, verbose=0)
    return distance(state(made), state(plain))


def steps_of_a_pass():
    """As many steps as batches: every epoch is a pass."""
    every = of_all((4, 3, 2), (4, 4, 4))
    plain, made = dense(), lockstep.distribute(dense())
    given = {"epochs": 3, "steps_per_epoch": 4, "shuffle": False, "verbose": 0}
    truth = plain.fit(Sequence(joined(every)), **given)
    found = made.fit(own(lambda: iter(every[rank])), **given)
    other = lockstep.distribute(dense())
    other.fit(own(Sequence(every[rank])), **given)
    return max(
        distance(state(made), state(plain)),
        distance(state(other), state(plain)),
        distance(found.history, truth.history),
    )


def on_batch():
    """Each argument of `train_on_batch` and the like is wrapped by itself."""
    every = [batches[0] for batches in of_all((4, 3, 2))]
    x, y = (np.concatenate(each) for each in zip(*every, strict=True))
    plain, made, (own_x, own_y) = dense(), lockstep.distribute(dense()), map(own, every[rank])
    pairs = [
        (made.train_on_batch(own_x, own_y), plain.train_on_batch(x, y)),
        (made.test_on_batch(own_x, y=own_y), plain.test_on_batch(x, y)),
        (made.predict_on_batch(own_x), plain.predict_on_batch(every[rank][0])),
        (state(made), state(plain)),
    ]
    return max(distance(*pair) for pair in pairs)


def predicts_to_function():
    """Each process gets its rows, in several calls."""
    every = of_all((4, 3, 2))
    made, got = lockstep.distribute(dense()), []
    lockstep.predict(made, own(Sequence(every[rank])), got.append, verbose=0)
    rows = np.concatenate([x for x, _ in every[rank]])
    assert len(got) > 1
    return distance(np.concatenate(got), dense().predict(rows, verbose=0))


def predicts_into_files():
    """Each process has a file of its rows, or a folder for several outputs."""
    far = 0.0
    for rows, steps in (((4, 3, 2), (6, 4, 5)), ((4, 3, 2), (6, 0, 5)), ((4, 4, 4), (5, 5, 5))):
        every = of_all(rows, steps)
        made = lockstep.distribute(dense())
        path = lockstep.predict(made, own(Sequence(every[rank])), "files.npy", verbose=0)
        assert path.name == f"files-{rank:05d}-of-{size:05d}.npy"
        here = len(every[rank]) * rows[rank]
        start = sum(rows[r] * steps[r] for r in range(rank))
        wanted = dense().predict(X, verbose=0)[start : start + here]
        found = np.load(path)
        assert found.shape == (here, 2)
        far = max(far, distance(found, wanted))
    both = keras.Model(made.inputs, {"one": made.outputs[0], "two": made.outputs[0] * 2})
    path = lockstep.predict(
        lockstep.distribute(both), own(Sequence(every[rank])), "folder", verbose=0
    )
    assert path.name == f"folder-{rank:05d}-of-{size:05d}"
    return max(far, distance(np.load(path / "two.npy"), 2 * wanted))


def predicts_on():
    """A call that has failed goes on at the newest position that all processes have noted."""
    every = of_all((4, 3, 2), (8, 6, 7))

    def read(end, scale=1):
        for number, (x, _) in enumerate(every[rank]):
            if number == end and rank == size - 1:
                raise ValueError("a file is damaged")
            yield (x * scale,)

    made, seen, before = lockstep.distribute(dense()), [], (predictions.SECONDS, predictions._SHARE)
    predictions.SECONDS, predictions._SHARE = 0.0, 0
    for data, of_last in ((read(4), "a file is damaged"), (read(None, 1 + rank), "have changed")):
        try:
            lockstep.predict(made, own(data), "on.npy", verbose=0)
        except (LockstepError, ValueError) as error:
            said = str(error)
        assert of_last in said or " left its predict with an error" in said, said
        assert rank < size - 1 or of_last in said, said
    predictions.SECONDS, predictions._SHARE = before
    place = Path(f"on-{rank:05d}-of-{size:05d}.npy.partial/position.json")
    noted = json.loads(place.read_text())
    older = noted["earlier"][0]["position"][0]
    assert older < noted["position"][0] <= 4, noted
    if rank == size - 1:  # as a kill leaves it before the last note
        place.write_text(json.dumps({**noted, **noted["earlier"][0], "earlier": []}))
    steps = Seen(seen)
    path = lockstep.predict(made, own(read(None)), "on.npy", verbose=0, callbacks=steps)
    assert seen[0] == older, seen
    assert seen[-1] == 7, seen
    wanted = dense().predict(np.concatenate([x for x, _ in every[rank]]), verbose=0)
    return distance(np.load(path), wanted)


def spread(batches, spec="x", devices=None):
    """The same batches as arrays of all processes, as guides of JAX make them."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices() if devices is None else devices), "x")
    made = jax.make_array_from_process_local_data
    layout = NamedSharding(mesh, PartitionSpec(*spec))
    return [tuple(made(layout, part) for part in batch) for batch in batches]


def global_arrays():
    """Arrays that JAX has laid out over the processes by rows are rows of each."""
    every = of_all((4, 4, 4), (5, 5, 5))
    far = [
        compared(dense, lambda batches, w=wrap: w(spread(batches)), every)
        for wrap in (Sequence, lambda batches: lambda: iter(batches), SpreadGrain)
    ]
    plain, made = dense(), lockstep.distribute(dense())
    x, y = (np.concatenate(each) for each in zip(*every[rank], strict=True))
    ((own_x, own_y),) = spread([(x, y)])
    own_batch = spread(every[rank][:1])[0]
    truth = joined(every)
    plain.fit(Sequence(truth), shuffle=False, verbose=0)
    plain.train_on_batch(*truth[0])
    made.fit(own((own_x, own_y)), batch_size=4 * size, shuffle=False, verbose=0)
    made.train_on_batch(*map(own, own_batch))
    return max(*far, distance(state(made), state(plain)))


class SpreadGrain:
    """Grain with batches of such arrays."""

    def __new__(cls, batches):
        import grain

        return grain.MapDataset.range(len(batches)).map(lambda number: batches[number])


class Seen(keras.callbacks.Callback):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def on_predict_batch_end(self, batch, logs=None):
        self.seen.append(batch)


def of_stream(process, end=12):
    """Files of this process, of which it is killed in the middle once."""
    for number in range(end):
        x = np.random.default_rng(100 * process + number).normal(size=(5 - process, 6))
        if number == 7 and process == rank == size - 1 and not Path("killed").exists():
            Path("killed").touch()
            time.sleep(1)  # the first process has noted more
            os.kill(os.getpid(), signal.SIGKILL)
        yield (x,)


def killed_predict():
    """A process that is killed predicts in files that it had begun."""
    predictions.SECONDS, predictions._SHARE, seen = 0.0, 0, []
    made, steps = lockstep.distribute(dense()), Seen(seen)
    path = lockstep.predict(made, own(of_stream(rank)), "kill.npy", verbose=0, callbacks=steps)
    assert 0 < seen[0] <= 7, seen
    wanted = dense().predict(np.concatenate([x for (x,) in of_stream(rank)]), verbose=0)
    return distance(np.load(path), wanted)


def leaves_files():
    """Two processes fail; another number of them begins anew."""
    try:
        return predicts_anew(stops=True)
    except (LockstepError, ValueError):
        return 0.0


def predicts_anew(stops=False):
    def read():
        for number, (x, _) in enumerate(of_number(size)[rank]):
            if number == 2 and stops:
                raise ValueError("a file is damaged")
            yield (x,)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        path = lockstep.predict(lockstep.distribute(dense()), own(read()), "anew.npy", verbose=0)
    words = (
        "anew-00000-of-00002.npy.partial is unfinished, but with 3 processes the rows are split "
        "differently"
    )
    assert rank or any(words in str(each.message) for each in said)
    return distance(np.load(path), dense().predict(np.concatenate([*read()], 1)[0], verbose=0))


def verified():
    """The batches that are compared are the global ones."""
    every, found = of_all((4, 3, 2)), []
    whole = [len(x) for x, _ in joined(every)]
    for data in (Sequence(every[rank]), lambda: iter(every[rank])):
        report = lockstep.verify(dense(), own(data), steps=len(whole) + 1)
        assert report.equal, str(report)
        assert report.rows == (min(whole), max(whole)), report.rows
        found.append(max(each.largest for each in report.differences))
    return max(found)


def killed_fit():
    """A process that is killed goes on from the checkpoint, as if it had not been."""

    def read(kills):
        passes.append(1)
        for number, batch in enumerate(of_all((4, 3, 2))[rank]):
            is_here = rank == size - 1 and number == 3 and len(passes) == 3
            if kills and is_here and not Path("killed").exists():
                Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    class Counts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append(batch)

    found, steps, passes = [], [], []
    for kills in (True, False):
        made = lockstep.distribute(dense())
        saves = [lockstep.Checkpoint("run", steps=2)] if kills else []
        rows = own(lambda kills=kills: read(kills))
        made.fit(rows, epochs=3, verbose=0, callbacks=[*saves, Counts()])
        found.append(state(made))
    assert Path("killed").exists()
    assert 18 < len(steps) < 36, len(steps)  # 18 steps, and those after the checkpoint
    plain = dense()
    plain.fit(Sequence(joined(of_all((4, 3, 2)))), epochs=3, shuffle=False, verbose=0)
    assert distance(*found) == 0, distance(*found)
    return distance(found[0], state(plain))


def fails(interrupts=False):
    """The data of the last process fail: all end in words, after the last common step."""
    every = of_all((4, 3, 2), (4, 4, 4))
    plain, made = dense(), lockstep.distribute(dense())
    for x, y in joined(every)[:2]:
        plain.train_on_batch(x, y)

    def read():
        yield from every[rank][:2]
        if rank == size - 1:
            if interrupts:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)  # it ends at once
            raise ValueError("a file is damaged")
        yield from every[rank][2:]

    try:
        made.fit(own(read()), verbose=0)
    except (LockstepError, ValueError, KeyboardInterrupt) as error:
        said = str(error)
    of_last = "" if interrupts else "a file is damaged"
    assert said == of_last if rank == size - 1 else f"Process {size - 1} left its fit" in said, said
    return distance(state(made), state(plain))


class Failed(Exception):
    """A machine has failed."""


class Stops(keras.callbacks.Callback):
    """Ends a `fit` after so many steps, as a failure does."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def on_train_batch_end(self, batch, logs=None):
        self.steps -= 1
        if not self.steps:
            raise Failed


def resumes(wrap, own=lockstep.process_local, shares=(4, 3, 2), stops=16):
    """A run that has failed within an epoch goes on, bit for bit."""
    found = []
    for folder, after in (("whole", None), ("parts", stops)):
        folder = f"{folder}-{wrap.__name__}-{shares[0] == shares[1]}"
        for stop in (after, None) if after else (None,):
            np.random.seed(7 + rank)
            made = lockstep.distribute(dense())
            rows = wrap(of_all(shares)[rank])
            callbacks = [lockstep.Checkpoint(folder, steps=2)]
            callbacks += [Stops(stop)] if stop else []
            given = {"epochs": 3, "verbose": 0, "callbacks": callbacks, "batch_size": 7}
            shuffles = isinstance(rows, tuple)
            try:
                own_rows = own(rows)
                held = lockstep.process_local(Sequence(of_all((2, 2, 2), (2, 1, 2))[rank]))
                made.fit(own_rows, shuffle=shuffles, validation_data=held, **given)
            except Failed:
                assert stop
        found.append(state(made))
    return distance(*found)


def whole_arrays(batches):
    return tuple(np.concatenate(each) for each in zip(*batches, strict=True))


def shuffled(batches):
    import tensorflow as tf

    rows = tf.data.Dataset.from_tensor_slices(whole_arrays(batches))
    return rows.shuffle(100, seed=3).batch(4)


def drawn(batches):
    import torch

    parts = [torch.from_numpy(each) for each in whole_arrays(batches)]
    rows, order = torch.utils.data.TensorDataset(*parts), torch.Generator().manual_seed(3)
    return torch.utils.data.DataLoader(rows, 4, shuffle=True, generator=order)


def all_drawn(batches):
    """The same `DataLoader` in every process."""
    return drawn(batches_of(0, (4,), (6,)))


def sampled(batches):
    """A `DataLoader` whose sampler needs to be told the epoch."""
    import torch

    parts = [torch.from_numpy(each) for each in whole_arrays(batches_of(0, (4,), (6,)))]
    rows = torch.utils.data.TensorDataset(*parts)
    sampler = torch.utils.data.DistributedSampler(rows, size, rank, shuffle=True, seed=1)
    return torch.utils.data.DataLoader(rows, 2, sampler=sampler)


def sequence(batches):
    return Sequence(batches)


def of_number(processes):
    """The rows of each of so many processes, and the batch of this one."""
    parts = np.array_split(np.arange(40), processes)
    return [
        [(X[part[cut : cut + 4]], Y[part[cut : cut + 4]]) for cut in range(0, len(part), 4)]
        for part in parts
    ]


def fails_on_two(stop=True):
    """Two processes fail within epoch 2; another number of them goes on from the end of epoch 1."""
    made = lockstep.distribute(dense())
    callbacks = [lockstep.Checkpoint("other", steps=2, keep=1)]
    callbacks += [keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: None)]
    callbacks += [Stops(8)] if stop else []
    rows = own(Sequence(of_number(size)[rank]))
    try:
        made.fit(rows, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    except Failed:
        assert stop
    return made


def goes_on():
    """Train as the run before it in two processes, up to an epoch; then in as many as there are."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = fails_on_two(stop=False)
    again = any(
        "within an epoch by a different number of processes" in str(w.message) for w in said
    )
    assert again or rank, [str(each.message) for each in said]
    plain = dense()
    for processes in (2, size, size):
        plain.fit(Sequence(joined(of_number(processes))), shuffle=False, verbose=0)
    return distance(state(made), state(plain))


class Counted:
    """Rows that are read by their index, which is counted."""

    def __init__(self, rows=31):
        self.rows, self.read = rows, []

    def __len__(self):
        return self.rows

    def __getitem__(self, row):
        self.read.append(row)
        return X[row], Y[row]


def split(workers=0, **given):
    """A `DataLoader` of which each process reads its rows alone, in the order of one process."""
    import torch

    found = []
    for build in (dense, lambda: lockstep.distribute(dense())):
        rows = Counted()
        order = torch.Generator().manual_seed(3) if "generator" in given else None
        made, loader = (
            build(),
            torch.utils.data.DataLoader(
                rows, 7, shuffle=True, num_workers=workers, generator=order
            ),
        )
        several = made.__dict__.get("_lockstep") is not None
        torch.manual_seed(5)
        data = lockstep.split_reading(loader) if several else loader
        history = made.fit(data, epochs=2, shuffle=False, verbose=0).history
        torch.manual_seed(6)
        data = lockstep.split_reading(loader) if several else loader
        predicted = made.predict(data, verbose=0)
        found.append((state(made), history, predicted))
    if not workers:
        # Two epochs and a prediction; the first batch of each call is read whole, to compare.
        assert len(rows.read) < 3 * (31 // size + 7) + 3 * 7, len(rows.read)
    return distance(*found)


class Lazy:
    """An array on a disk, which counts the rows that are read."""

    def __init__(self, file):
        self.file, self.read, self.whole = file, 0, 0
        self.shape, self.dtype = file.shape, file.dtype

    def __getitem__(self, rows):
        found = self.file[rows]
        self.read += len(found)
        return found

    def __array__(self, *_, **__):
        raise AssertionError("all rows were read at once")


def on_disk():
    """HDF5 data sets and memory maps with the same rows in each process."""
    import h5py

    name = f"rows-{rank}"
    if not Path(f"{name}.npy").exists():
        with h5py.File(f"{name}.h5", "w") as file:
            file["x"], file["y"] = X[:31], Y[:31]
        np.save(f"{name}.npy", W[:31])
    file = h5py.File(f"{name}.h5", "r")
    return Lazy(file["x"]), file["y"], np.load(f"{name}.npy", mmap_mode="r")


def of_files(_):
    return on_disk()


def split_arrays():
    """Arrays on a disk, of which each process reads its rows, in the order of one process."""
    import torch

    far, (x, y, weights) = [], on_disk()
    for shuffle in (True, "batch", False):
        found = []
        for build in (dense, lambda: lockstep.distribute(dense())):
            made = build()
            several = made.__dict__.get("_lockstep") is not None
            np.random.seed(5)
            torch.manual_seed(5)
            data = (lockstep.split_reading((x, y, weights)),) if several else (X[:31], Y[:31])
            more = {} if several else {"sample_weight": W[:31]}
            given = {"batch_size": 7, "epochs": 2, "shuffle": shuffle, "verbose": 0}
            history = made.fit(*data, **given, **more).history
            data = lockstep.split_reading(x) if several else X[:31]
            predicted = made.predict(data, batch_size=5, verbose=0)
            found.append((state(made), history, predicted))
        far.append(distance(*found))
    # Three times two epochs and a prediction; the first batch of each call is read whole.
    assert x.read < 9 * (31 // size + 5) + 6 * 7, x.read
    return max(far)


def few_rows():
    """A batch of fewer rows than processes: one of them has none."""
    import torch

    loader = torch.utils.data.DataLoader(Counted(9), 8)
    plain, made = dense(), lockstep.distribute(dense())
    given = {"epochs": 2, "shuffle": False, "verbose": 0, "validation_data": None}
    plain.fit(loader, **given)
    made.fit(lockstep.split_reading(loader), **given)
    return distance(state(made), state(plain))


def rows_stay():
    """Where the devices of each process need its rows, none travels."""
    group, sent = current(), []
    gather = group.gather
    group.gather = lambda *given: sent.append(given) or gather(*given)
    try:
        far = compared(dense, Sequence, of_all((4, 4, 4), (5, 5, 5)))
        assert not sent, len(sent)
        compared(dense, Sequence, of_all((4, 3, 2)))
        assert sent
    finally:
        del group.gather
    return far


def sampler():
    """A `DistributedSampler` is told the epoch."""
    import torch

    rows = torch.utils.data.TensorDataset(torch.from_numpy(X[:24]), torch.from_numpy(Y[:24]))

    def of(process):
        return torch.utils.data.DistributedSampler(rows, size, process, shuffle=True, seed=1)

    plain, made = dense(), lockstep.distribute(dense())
    for epoch in (0, 1, 2):
        every = []
        for process in range(size):
            order = of(process)
            order.set_epoch(epoch)
            cuts = np.array([*order]).reshape(-1, 4)
            every.append([(X[cut], Y[cut]) for cut in cuts])
        plain.fit(Sequence(joined(every)), shuffle=False, verbose=0)
    loader = torch.utils.data.DataLoader(rows, 4, sampler=of(rank))
    made.fit(own(loader), epochs=3, shuffle=False, verbose=0)
    return distance(state(made), state(plain))


def stops_alone():
    """A callback of the last process stops: all end in words, at once."""

    class StopsAlone(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1 and rank == size - 1

    made, start = lockstep.distribute(dense()), time.monotonic()
    try:
        made.fit(own(Sequence(of_all((4, 3, 2))[rank])), verbose=0, callbacks=[StopsAlone()])
    except LockstepError as error:
        said = str(error)
    assert f"Process {size - 1} has left an epoch" in said, said
    assert time.monotonic() - start < 100, "the patience of a process"
    return 0.0


def plain_beside(*names):
    """Plain data in one process are found by it, and not at the end of the patience."""
    (x, y), start = (each[:8] for each in (X, Y)), time.monotonic()
    for name in names:
        made = lockstep.distribute(dense())
        before = made.get_weights()
        given = (x,) if name == "predict_on_batch" else (x, y)
        if rank != size - 1:
            given = [*map(own, given)]
        try:
            getattr(made, name)(*given)
        except LockstepError as error:
            said = str(error)
        mine = f"was given lockstep.process_local, but process {size - 1} plain data"
        left = f"Process {size - 1} left its {name}"
        assert (mine if rank == size - 1 else left) in said, said
        assert distance(made.get_weights(), before) == 0
        made.train_on_batch(x, y)
    assert time.monotonic() - start < 100, "the patience of a process"
    return 0.0


def ends_once():
    """A generator trains one epoch, and a further one without a batch is a warning."""
    made = lockstep.distribute(dense())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made.fit(own(each for each in [(X[:4], Y[:4])] * 3), epochs=2, verbose=0)
    assert any("ran out of data" in str(each.message) for each in said)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made.fit(own(lambda: iter([(X[:4], Y[:4])] * 3)), epochs=2, verbose=0)
    assert not any("ran out of data" in str(each.message) for each in said)
    return abs(float(made.optimizer.iterations.value) - 9)


own = lockstep.process_local
CASES |= {
    "plain batch beside": lambda: plain_beside("train_on_batch"),
    "plain batches beside": lambda: plain_beside("test_on_batch", "predict_on_batch"),
    "ends once": ends_once,
    "sampler": sampler,
    "stops alone": stops_alone,
    "rows stay": rows_stay,
    "split reading": split,
    "split arrays": split_arrays,
    "split by workers": lambda: split(workers=2, generator=True),
    "split few rows": few_rows,
    "resumes arrays": lambda: resumes(whole_arrays),
    "resumes a PyDataset": lambda: resumes(sequence),
    "resumes where rows stay": lambda: resumes(sequence, shares=(4, 4, 4)),
    "resumes tf.data": lambda: resumes(shuffled),
    "resumes a DataLoader": lambda: resumes(drawn),
    "resumes a sampler": lambda: resumes(sampled),
    "resumes split arrays": lambda: resumes(of_files, lockstep.split_reading, stops=13),
    "resumes split": lambda: resumes(all_drawn, lockstep.split_reading),
    "fails on two": lambda: distance(fails_on_two().count_params(), dense().count_params()),
    "goes on": goes_on,
    "on_batch": on_batch,
    "predict to a function": predicts_to_function,
    "predict into files": predicts_into_files,
    "predict goes on": predicts_on,
    "global arrays": global_arrays,
    "verify": verified,
    "killed predict": killed_predict,
    "leaves files": leaves_files,
    "predict anew": predicts_anew,
    "fails in one process": fails,
    "Ctrl-C in one process": lambda: fails(interrupts=True),
    "killed fit": killed_fit,
}
CASES |= {"arrays": arrays, "class weights": class_weights, "steps_per_epoch": steps}
CASES["steps of a pass"] = steps_of_a_pass


def refused(call):
    """Return the class and the words of an error, after which nothing has changed."""
    made = lockstep.distribute(dense())
    before = [keras.ops.convert_to_numpy(each.value) for each in made.variables]
    try:
        call(made)
    except (LockstepError, ValueError) as error:
        assert distance([each.value for each in made.variables], before) == 0
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def of_shape(width):
    return [(np.zeros((3, width)), np.zeros((3, 2)))]


def repeated():
    """A `DataLoader` whose sampler repeats a row."""
    import torch

    rows = torch.utils.data.TensorDataset(torch.from_numpy(X[:31]), torch.from_numpy(Y[:31]))
    sampler = torch.utils.data.DistributedSampler(rows, num_replicas=4, rank=rank)
    return torch.utils.data.DataLoader(rows, 4, sampler=sampler)


REFUSED = {
    "plain beside": lambda made: made.fit(*((own((X, Y)),) if rank else (X, Y)), verbose=0),
    "plain evaluate": lambda made: made.evaluate(*((X, Y) if rank else (own((X, Y)),)), verbose=0),
    "y": lambda made: made.fit(own(X), Y, verbose=0),
    "wrapped one by one": lambda made: made.fit(own(X), own(Y), verbose=0),
    "split": lambda made: made.fit(own((X, Y)), validation_split=0.2, verbose=0),
    "few rows": lambda made: made.fit(own((X, Y)), batch_size=1, verbose=0),
    "shapes": lambda made: made.fit(own(lambda: iter(of_shape(6 + rank))), verbose=0),
    "twice": lambda made: made.fit(own(own(X)), verbose=0),
    "nothing": lambda made: made.fit(own(None), verbose=0),
    "no rows": lambda made: made.evaluate(own(lambda: iter([])), verbose=0),
    "text": lambda made: made.fit(own(lambda: iter([(np.array(["a"]), Y[:1])])), verbose=0),
    "a number": lambda made: made.fit(own(lambda: iter([(X[:2], np.float64(1))])), verbose=0),
    "repeats": lambda made: made.fit(own(repeated()), verbose=0),
    "a class weight": lambda made: made.fit(own(iter_of_rows), class_weight={0: 1.0}, verbose=0),
    "batch beside": lambda made: made.train_on_batch(own(X), Y),
    "replicated": lambda made: made.fit(own(Sequence(spread([(X, Y)], [None]))), verbose=0),
    "columns": lambda made: made.fit(own(Sequence(spread([(X, X)], [None, "x"]))), verbose=0),
    "in reverse": lambda made: made.predict(own(spread([(X,)], "x", reversed_devices())[0]), 9),
    "plain global": lambda made: made.fit(Sequence(spread([(X, Y)])), verbose=0),
    "verify beside": lambda made: lockstep.verify(made, own((X, Y)) if rank else (X, Y), steps=1),
    "bench": lambda made: lockstep.bench(made, own((X, Y)), steps=1),
    "random rows": lambda made: made.fit(lockstep.split_reading(random_rows()), verbose=0),
    "not by row": lambda made: made.fit(lockstep.split_reading(iter([X])), verbose=0),
    "other files": lambda made: made.fit(lockstep.split_reading((X + rank, Y)), verbose=0),
    "other numbers": lambda made: made.fit(lockstep.split_reading((X, Y[1:])), verbose=0),
    "a split class weight": lambda made: made.fit(
        lockstep.split_reading(all_drawn(None)), class_weight={0: 1.0}, verbose=0
    ),
    "other order": lambda made: made.fit(lockstep.split_reading(other_order()), verbose=0),
    "adapt": lambda made: layers.Normalization().adapt(own(X)),
    "a tuple": lambda made: made.fit((own(X), own(Y)), verbose=0),
    "batch sizes": lambda made: made.fit(own((X, Y)), batch_size=8 if rank else 4, verbose=0),
}


def reversed_devices():
    import jax

    return jax.devices()[::-1]


def random_rows():
    import torch

    class Random(Counted):
        def __getitem__(self, row):
            return X[row] + np.random.normal(), Y[row]

    return torch.utils.data.DataLoader(Random(), 4)


def other_order():
    import torch

    order = torch.Generator().manual_seed(rank)
    return torch.utils.data.DataLoader(Counted(), 4, shuffle=True, generator=order)


def iter_of_rows():
    return iter([(X, Y)])


def warned():
    """The same rows in two processes are a warning in the first one."""
    made = lockstep.distribute(dense())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made.fit(own((X, Y)), batch_size=9, shuffle=False, verbose=0)
    return [str(each.message) for each in said]


def main(names):
    for name in names:
        if name in REFUSED:
            say(case=name, refused=refused(REFUSED[name]))
            continue
        found = warned() if name == "warned" else CASES[name]()
        if rank == 0:
            say(case=name, **({"warned": found} if name == "warned" else {"far": found}))


if __name__ == "__main__":
    main(sys.argv[1].split(","))
