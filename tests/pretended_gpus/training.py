"""What tests train on pretended GPUs: python -m tests.pretended_gpus.training FOLDER CASE ...

Each case compares with the same on one device, in float64.
"""

import os
import sys
import warnings
from functools import partial
from pathlib import Path

import keras
import numpy as np
from keras import layers

import lockstep
from lockstep.engines.replicas.sketches import Bounds, first_mismatch
from tests import agreement
from tests.agreement import both, seeded, values

assert_equal = partial(agreement.assert_equal, bound=1e-10)
DEVICES = [name for name in lockstep.devices() if name.startswith("gpu:")]
QUIET = {"verbose": 0, "shuffle": False}


def data(rows=23):
    rng = np.random.default_rng(4)
    return rng.normal(size=(rows, 6, 6, 3)), rng.normal(size=(rows, 2))


def network(width=12):
    """A layer that splits, one that looks across the batch, and one that does not know rows."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(11)
    image = keras.Input((6, 6, 3), name="image")
    x = layers.Conv2D(4, 3, activation="tanh", kernel_regularizer="l2", name="conv")(image)
    x = layers.BatchNormalization(name="norm")(x)
    x = layers.Dense(width, "tanh", name="wide")(layers.Flatten()(x))
    model = keras.Model(image, layers.Dense(2, name="head")(x))
    model.compile(keras.optimizers.Adam(0.005), "mse", metrics=["mae"])
    return model


def results(model, **options):
    x, y = data()
    return [
        model.fit(
            x, y, batch_size=5, epochs=2, validation_data=(x[:7], y[:7]), **QUIET, **options
        ).history,
        model.evaluate(x, y, batch_size=5, verbose=0),
        model.predict(x, batch_size=5, verbose=0),
        model.train_on_batch(x[:7], y[:7]),
        model.test_on_batch(x[:3], y[:3]),
        model.predict_on_batch(x[:1]),
    ]


def compared(make=network, run=results, change=lockstep.distribute):
    one = seeded(make)
    expected = [run(one), values(one)]
    many = seeded(make)
    change(many)
    found = [run(many), values(many)]
    assert_equal(expected, found)
    return many


def everything(folder):
    """fit, evaluate, predict and the calls on one batch, on all devices and after a release."""
    model = compared()
    lockstep.release(model)
    file = folder / f"model-{os.getpid()}.keras"  # the model of each process is its own again
    model.save(file)
    x, _ = data()
    assert_equal(model.predict(x, verbose=0), keras.saving.load_model(file).predict(x, verbose=0))


def sharded(folder):
    compared(lambda: network(700), change=lambda model: lockstep.distribute(model, state="sharded"))


def micro_batches(folder):
    def make():
        model = network()
        model.get_layer("norm").trainable = False
        return model

    compared(make, change=lambda model: lockstep.distribute(model, micro_batch_size=2))


def branches(folder):
    def make():
        given = [keras.Input((6, 6, 3), name=name) for name in ("a", "b")]
        sides = [
            layers.Dense(3, "tanh", name=f"of_{each.name}")(
                layers.Flatten(name=f"flat_{each.name}")(each)
            )
            for each in given
        ]
        head = layers.Dense(2, name="head")(layers.Concatenate(name="joined")(sides))
        model = keras.Model(given, head)
        model.compile("adam", "mse")
        return model

    def run(model):
        x, y = data()
        return model.fit([x, x[::-1]], y, batch_size=5, epochs=2, **QUIET).history

    places = {"flat_a": "gpu:0", "of_a": "gpu:0"}
    places |= dict.fromkeys(("flat_b", "of_b", "joined", "head"), "gpu:1")
    compared(make, run, lambda model: lockstep.place(model, places))


def resumed(folder):
    """A run that stops after an epoch, and goes on on another number of devices."""

    def run(model, epochs):
        x, y = data()
        options = {"callbacks": [lockstep.Checkpoint(folder / "run")], "verbose": 0}
        return model.fit(x, y, batch_size=5, epochs=epochs, **options).history

    x, y = data()
    one = network()
    lockstep.distribute(one, 1)
    whole = one.fit(
        x, y, batch_size=5, epochs=3, verbose=0, callbacks=[lockstep.Checkpoint(folder / "one")]
    )
    first, second = network(), network()
    keras.utils.set_random_seed(11)
    run(lockstep.distribute(first), 2)
    found = run(lockstep.distribute(second, 2), 3)
    assert_equal(values(one), values(second))
    assert_equal(whole.history["loss"][-1], found["loss"][-1])


# ---------------------------------------------------------------------- PyTorch alone


def checkpointed(folder):
    """Parts of weights, and a layer that the backward pass runs again in its own thread."""
    from torch.utils.checkpoint import checkpoint

    class Block(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(100, "tanh")

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            return x + checkpoint(self.dense, x, use_reentrant=False)

    def make():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(100), Block(), layers.Dense(2)])
        model.compile("adam", "mse")
        return model

    def run(model):
        x, y = data()
        return model.fit(x[:, 0, :2, :2].reshape(23, 4), y, batch_size=5, **QUIET).history

    model = compared(make, run, lambda model: lockstep.distribute(model, state="sharded"))
    assert "in shards" in repr(model.layers[1].dense.kernel)


def penalty(folder):
    """A GAN with a gradient penalty: the gradient of a gradient, with sums of all devices."""
    import torch

    from tests.torch.test_on_own_steps import Gan

    def make():
        model = Gan()
        model.compile()
        return model

    def run(model):
        return model.fit(data()[0][:, 0, :2, :2].reshape(23, 4), batch_size=8, **QUIET).history

    # The script of the user has made more operations than the workers ever will.
    for _ in range(3000):
        torch.ones(1, requires_grad=True).neg()
    compared(make, run)


def without_call(folder):
    """A model without `call`, of which the first step builds an optimizer."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.part = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
            self.built = True
            self.own = keras.optimizers.Adam(0.01)

        def train_step(self, x):
            import torch

            self.zero_grad()
            loss = keras.ops.mean(keras.ops.square(self.part(x)))
            loss.backward()
            weights = self.part.trainable_variables
            with torch.no_grad():
                self.own.apply([weight.value.grad for weight in weights], weights)
            return {"loss": loss}

    def make():
        model = Own()
        model.compile()
        return model

    def run(model):
        return model.fit(data()[0][:, 0, :2, :2].reshape(23, 4), batch_size=8, **QUIET).history

    one, many = both(make, None)
    assert_equal(run(one), run(many))
    assert_equal(values(one), values(many))


# ---------------------------------------------------------------------- TensorFlow alone


def unused_sums(folder):
    """Sums of gradients that one replica alone uses: a logged norm, and what `verify` looks at."""
    import tensorflow as tf

    from lockstep.engines import current_engine

    class Logs(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            weights = self.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            with tf.GradientTape() as tape:
                size = tf.reduce_mean(tf.abs(self(x, training=True)))
            norm = tf.linalg.global_norm(tape.gradient(size, weights))
            return {"loss": loss, "norm": norm}

    def make():
        given = keras.Input((4,))
        model = Logs(given, layers.Dense(2)(layers.Dense(5, "tanh")(given)))
        model.compile("sgd", "mse")
        return model

    x, y = data()
    x = x[:, 0, :2, :2].reshape(23, 4)
    compared(make, lambda model: model.fit(x, y, batch_size=8, **QUIET).history)
    seen = []
    for devices in (1, 2):
        model = network()
        lockstep.distribute(model, devices)
        probe = current_engine().probe(model)
        probe.build(data(8))
        with probe.precise():
            seen += [*probe.recorded([data(8)])]
    (one,), several = seen
    assert first_mismatch(one, several, 8, Bounds(1e-5, 1e-5, 1e-5)) is None
    assert sum(name.startswith("gradient") for name in one) == 8


def types(folder):
    """Weights of two types, and of one that NCCL has no sum for."""

    def make(other):
        first = layers.Dense(5, "tanh", dtype=other)
        model = keras.Sequential([keras.Input((4,)), first, layers.Dense(2)])
        model.compile("sgd", "mse")
        return model

    x, y = data()
    x = x[:, 0, :2, :2].reshape(23, 4)
    for other, bound in {"float32": 1e-6, "bfloat16": 2e-2}.items():
        one, many = both(partial(make, other), None)
        for model in (one, many):
            model.fit(x, y, batch_size=8, **QUIET)
        for a, b in zip(values(one), values(many), strict=True):
            np.testing.assert_allclose(
                a.astype("float64"), b.astype("float64"), rtol=0, atol=bound, err_msg=other
            )


def main(folder, *cases):
    keras.config.set_floatx("float64")
    warnings.simplefilter("error", lockstep.errors.UnsplitBatchWarning)
    for case in cases:
        if case in ("checkpointed", "penalty", "without_call"):
            warnings.simplefilter("ignore", lockstep.errors.UnsplitBatchWarning)
        globals()[case](Path(folder))
        print(case, "is equal on", *DEVICES)


if __name__ == "__main__":
    main(*sys.argv[1:])
