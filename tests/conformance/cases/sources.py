"""Every kind of data that Keras accepts, through fit, evaluate and predict."""

import keras
from keras import layers

from lockstep.attach.attachment import session_of
from tests.conformance.cases.case import Case, classes, features, fitted_with, rows_of, weighted


def _compiled(model):
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"], weighted_metrics=["mse"]
    )
    return model


def _one_input(sizes):
    return _compiled(
        keras.Sequential(
            [keras.Input((4,)), layers.Dense(5, activation="tanh"), layers.Dense(2, name="y")]
        )
    )


def _structured(form):
    """A model that takes its three inputs in this form."""

    def make(sizes):
        a, b, c = (
            keras.Input((width,), name=name) for name, width in (("a", 4), ("b", 3), ("c", 2))
        )
        joined = layers.Dense(5, activation="tanh")(layers.Concatenate()([a, b, c]))
        return _compiled(keras.Model(form(a, b, c), layers.Dense(2, name="y")(joined)))

    return make


def _structured_data(form):
    def draw(rows, rng):
        return form(*(features(width)(rows, rng) for width in (4, 3, 2)))

    return rows_of(draw, features(2))


def _as_dict(a, b, c):
    return {"a": a, "b": b, "c": c}


def _as_list(a, b, c):
    return [a, b, c]


def _as_nest(a, b, c):
    return {"a": a, "more": [b, {"c": c}]}


def _arrays(form):
    return Case(_structured(form), _structured_data(form), fitted_with(in_batches=True))


# ------------------------------------------------------------- sources made of arrays


def _through(source, **options):
    """Fit with validation, evaluate and predict, all on what `source` makes of arrays."""

    def live(model, training, held_out, sizes):
        def of(arrays):
            return source(arrays, sizes.batch)

        named = {"shuffle": False, "epochs": 2, "verbose": 0, **options}
        return {
            "fit": model.fit(of(training), validation_data=of(held_out), **named).history,
            "evaluate": model.evaluate(of(held_out), verbose=0, return_dict=True),
            "predict": model.predict(of(held_out), verbose=0),
        }

    return live


def _endless(source):
    """Two epochs over a source that does not end, with the steps said."""

    def live(model, training, held_out, sizes):
        steps = -(-sizes.rows // sizes.batch)
        held_out_steps = -(-sizes.held_out // sizes.batch)
        history = model.fit(
            source(training, sizes.batch),
            steps_per_epoch=steps - 3,  # the second epoch begins within the data
            epochs=2,
            shuffle=False,
            validation_data=source(held_out, sizes.batch),
            validation_steps=held_out_steps,
            verbose=0,
        ).history
        held_out = source(held_out, sizes.batch), held_out_steps
        return {
            "fit": history,
            "evaluate": model.evaluate(held_out[0], steps=held_out[1], verbose=0, return_dict=True),
            "predict": model.predict(held_out[0], steps=held_out[1], verbose=0),
        }

    return live


def _slices(arrays, batch):
    rows = len(keras.tree.flatten(arrays)[0])
    for start in range(0, rows, batch):
        yield keras.tree.map_structure(lambda a, s=start: a[s : s + batch], arrays)


def _tf_batched(arrays, batch):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(arrays).batch(batch).prefetch(2)


def _tf_without_rest(arrays, batch):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(arrays).batch(batch, drop_remainder=True)


def _tf_repeated(arrays, batch):
    return _tf_batched(arrays, batch).repeat()


def _tf_unknown_length(arrays, batch):
    return _tf_batched(arrays, batch).filter(lambda *parts: True)


def _torch_loader(arrays, batch):
    import torch

    tensors = [torch.from_numpy(array) for array in arrays]
    dataset = torch.utils.data.TensorDataset(*tensors)
    return torch.utils.data.DataLoader(dataset, batch_size=batch)


def _torch_tensors(model, training, held_out, sizes):
    import torch

    training, held_out = keras.tree.map_structure(torch.from_numpy, (training, held_out))
    return fitted_with(in_batches=True)(model, training, held_out, sizes)


def _tf_tensors(model, training, held_out, sizes):
    import tensorflow as tf

    training, held_out = keras.tree.map_structure(tf.convert_to_tensor, (training, held_out))
    return fitted_with(in_batches=True)(model, training, held_out, sizes)


def _jax_arrays(model, training, held_out, sizes):
    import jax.numpy as jnp

    training, held_out = keras.tree.map_structure(jnp.asarray, (training, held_out))
    return fitted_with(in_batches=True)(model, training, held_out, sizes)


class _Rows:
    """Arrays as a source of single rows."""

    def __init__(self, arrays):
        self.arrays = arrays

    def __len__(self):
        return len(self.arrays[0])

    def __getitem__(self, row):
        return tuple(array[row] for array in self.arrays)


def _grain_map(arrays, batch):
    import grain

    return grain.MapDataset.source(_Rows(arrays)).batch(batch)


def _grain_iter(arrays, batch):
    return _grain_map(arrays, batch).to_iter_dataset()


def _grain_loader(arrays, batch):
    import grain

    rows = _Rows(arrays)
    return grain.DataLoader(
        data_source=rows,
        sampler=grain.samplers.SequentialSampler(len(rows), grain.sharding.NoSharding()),
        operations=[grain.transforms.Batch(batch)],
    )


class Batches(keras.utils.PyDataset):
    """Arrays in batches, as a user would write it."""

    def __init__(self, arrays, batch, **kwargs):
        super().__init__(**kwargs)
        self.batches = list(_slices(arrays, batch))

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def _py_dataset(**kwargs):
    return lambda arrays, batch: Batches(arrays, batch, **kwargs)


def _in_threads(model, *given):
    """Two threads, and none for Keras alone, which then trains some batches twice, others never.

    keras/src/trainers/data_adapters/py_dataset_adapter.py, PyDatasetEnqueuer.stop
    """
    threads = 1 if session_of(model) is None else 2
    return _through(_py_dataset(workers=threads))(model, *given)


def _generator_forever(arrays, batch):
    while True:
        yield from _slices(arrays, batch)


def _generator_of_odd_sizes(arrays, batch):
    """Batches whose size changes all the time."""
    rows, start = len(arrays[0]), 0
    for size in [batch, 5, batch + 6] * rows:
        if start >= rows:
            return
        yield tuple(array[start : start + size] for array in arrays)
        start += size


def _generators(of):
    """A fresh generator for each use; the first ends with its only epoch."""

    def live(model, training, held_out, sizes):
        batch = sizes.batch
        return {
            "fit": model.fit(of(training, batch), shuffle=False, verbose=0).history,
            "evaluate": model.evaluate(of(held_out, batch), verbose=0, return_dict=True),
            "predict": model.predict(of(held_out, batch), verbose=0),
        }

    return live


def _some_steps(model, training, held_out, sizes):
    """Epochs that end before the arrays do."""
    return fitted_with(steps_per_epoch=7, epochs=2)(model, training, held_out, sizes)


def _classifier(sizes):
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(5, activation="tanh"), layers.Dense(3)]
    )
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
    )
    return model


_WITH_WEIGHT = rows_of(features(4), features(2), weighted)
_CLASS_WEIGHT = {0: 0.5, 1: 2.0, 2: 0.0}


def _source(source, live=_through, data=_WITH_WEIGHT, **options):
    return Case(_one_input, data, live(source, **options))


SOURCES = {
    "NumPy dict": _arrays(_as_dict),
    "NumPy list": _arrays(_as_list),
    "NumPy nested": _arrays(_as_nest),
    "NumPy, validation_split": Case(_one_input, live=fitted_with(validation_split=0.25)),
    "NumPy, class_weight": Case(
        _classifier,
        rows_of(features(4), classes(3)),
        fitted_with(class_weight=_CLASS_WEIGHT),
    ),
    "NumPy, sample_weight": Case(_one_input, _WITH_WEIGHT),
    "NumPy, shuffled": Case(_one_input, live=fitted_with(shuffle=True, epochs=2)),
    "NumPy, batches shuffled": Case(_one_input, live=fitted_with(shuffle="batch", epochs=2)),
    "NumPy, steps_per_epoch": Case(_one_input, live=_some_steps),
    "JAX arrays": Case(_one_input, live=_jax_arrays),
    "TensorFlow tensors": Case(_one_input, live=_tf_tensors),
    "torch tensors": Case(_one_input, live=_torch_tensors),
    "tf.data": _source(_tf_batched),
    "tf.data, dict inputs": Case(
        _structured(_as_dict), _structured_data(_as_dict), _through(_tf_batched)
    ),
    "tf.data, remainder dropped": _source(_tf_without_rest),
    "tf.data, repeated": _source(_tf_repeated, _endless),
    "tf.data, unknown cardinality": _source(_tf_unknown_length),
    "tf.data, class_weight": Case(
        _classifier,
        rows_of(features(4), classes(3)),
        _through(_tf_batched, class_weight=_CLASS_WEIGHT),
    ),
    "PyDataset": _source(_py_dataset()),
    "PyDataset, shuffled": _source(_py_dataset(), shuffle=True),
    "PyDataset, 2 threads": Case(_one_input, _WITH_WEIGHT, _in_threads),
    "torch DataLoader": _source(_torch_loader),
    "Grain MapDataset": _source(_grain_map),
    "Grain IterDataset": _source(_grain_iter),
    "Grain DataLoader": _source(_grain_loader),
    "generator that ends": _source(_slices, _generators),
    "generator that does not end": _source(_generator_forever, _endless),
    "generator of changing batch sizes": _source(_generator_of_odd_sizes, _generators),
}
