"""Each kind of data that `fit` takes, made afresh, with an order that is drawn at random.

Every one is made of rows, `(x, y)`, which may be dicts and lists of arrays.
"""

import keras
import numpy as np

from tests.conformance import common
from tests.conformance.side_by_side import BATCH, ROWS


def some_rows():
    return common.data(ROWS)


def arrays(rows=some_rows, batch=BATCH):
    x, y = rows()
    return {"x": x, "y": y, "batch_size": batch, "shuffle": True}


def arrays_by_batch():
    return {**arrays(), "shuffle": "batch"}


def arrays_that_wrap():
    """Two passes over the data have three epochs and a half."""
    return {**arrays(), "steps_per_epoch": 4}


def jax_arrays():
    return {**arrays(), "x": keras.ops.convert_to_tensor(common.data(ROWS)[0])}


class Batches(keras.utils.PyDataset):
    """Adds noise from NumPy's random numbers, as an augmentation does."""

    def __init__(self, rows=some_rows, batch=BATCH, noise=True, **kwargs):
        super().__init__(**kwargs)
        self.rows = rows()
        self.batch = batch
        self.noise = noise

    def __len__(self):
        return -(-_count(self.rows) // self.batch)

    def __getitem__(self, index):
        x, y = _taken(self.rows, slice(index * self.batch, (index + 1) * self.batch))
        return keras.tree.map_structure(self._noisy, x), y

    def _noisy(self, x):
        if not self.noise or x.dtype != "float32":
            return x
        noise = np.random.normal(size=(len(x), *[1] * (x.ndim - 1)))
        return x + noise.astype("float32")


def _count(rows):
    return len(keras.tree.flatten(rows)[0])


def _taken(rows, which):
    return keras.tree.map_structure(lambda array: array[which], rows)


def py_dataset(rows=some_rows, batch=BATCH):
    return {"x": Batches(rows, batch), "shuffle": True}


def py_dataset_with_workers():
    return {"x": Batches(noise=False, workers=2), "shuffle": True}


class Reordered(Batches):
    """Orders its batches anew after each epoch, from random numbers of its own."""

    def __init__(self, **kwargs):
        super().__init__(noise=False, **kwargs)
        self.rng = np.random.default_rng(4)
        self.order = self.rng.permutation(len(self))

    def __getitem__(self, index):
        return super().__getitem__(int(self.order[index]))

    def on_epoch_end(self):
        self.order = self.rng.permutation(len(self))

    def get_state(self):
        return {"order": self.order.copy(), "rng": self.rng.bit_generator.state}

    def set_state(self, state):
        self.order = state["order"].copy()
        self.rng.bit_generator.state = state["rng"]


def py_dataset_with_state():
    return {"x": Reordered(), "shuffle": False}


def tf_data(rows=some_rows, batch=BATCH):
    import tensorflow as tf

    rows = keras.tree.lists_to_tuples(rows())  # a list would be one tensor
    data = tf.data.Dataset.from_tensor_slices(rows).shuffle(_count(rows), seed=3)
    return {"x": data.batch(batch).prefetch(2)}


def tf_data_repeated():
    import tensorflow as tf

    x, y = common.data(ROWS)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=3).repeat()
    return {"x": data.batch(BATCH), "steps_per_epoch": 5}


def torch_loader(rows=some_rows, batch=BATCH):
    import torch

    generator = torch.Generator().manual_seed(6)
    return {
        "x": torch.utils.data.DataLoader(
            _one_by_one(rows), batch, shuffle=True, generator=generator
        ),
    }


def torch_loader_of_the_global_generator():
    import torch

    x, y = map(torch.from_numpy, common.data(ROWS))
    torch.manual_seed(6)
    data = torch.utils.data.TensorDataset(x, y)
    return {"x": torch.utils.data.DataLoader(data, BATCH, shuffle=True)}


def grain_dataset(rows=some_rows, batch=BATCH):
    import grain

    return {"x": grain.MapDataset.source(_one_by_one(rows)).shuffle(seed=5).batch(batch)}


def _one_by_one(rows):
    every = rows()
    return [_taken(every, row) for row in range(_count(every))]


def generator(rows=some_rows, batch=BATCH):
    every = rows()
    rng = np.random.default_rng(8)

    def batches():
        while True:
            yield _taken(every, rng.integers(0, _count(every), batch))

    return {"x": batches(), "steps_per_epoch": 6}


SOURCES = {
    each.__name__: each
    for each in (
        arrays,
        arrays_by_batch,
        arrays_that_wrap,
        jax_arrays,
        py_dataset,
        py_dataset_with_workers,
        py_dataset_with_state,
        tf_data,
        tf_data_repeated,
        torch_loader,
        torch_loader_of_the_global_generator,
        grain_dataset,
        generator,
    )
}
