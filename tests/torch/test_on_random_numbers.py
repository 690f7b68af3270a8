"""What draws random numbers draws those of one device, in every process."""

import os
import random
from functools import partial
from random import random as drawn

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops
from numpy.random import random_sample

import lockstep
from lockstep.engines.torch.ranks import pool
from lockstep.engines.torch.same_model.generators import set_state, state_of
from lockstep.engines.torch.steps.replica import RandomStreams
from lockstep.errors import ProcessesDisagree
from tests.agreement import assert_equal, both
from tests.tiers import further

pytestmark = pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")

QUIET = {"verbose": 0, "shuffle": False, "batch_size": 6}


def data():
    rng = np.random.default_rng(1)
    return rng.normal(size=(23, 4)), rng.normal(size=(23, 2))


def noise(like):
    return 0.02 * torch.randn(tuple(like.shape), dtype=torch.float64)


class NoisySteps(keras.optimizers.SGD):
    """Adds noise to the weights, from its third step on."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        if int(self.iterations) > 1:
            variable.assign_add(noise(variable))


class NoisyWeights(keras.constraints.Constraint):
    """Is called by Keras after the update of a weight."""

    def __call__(self, weight):
        return weight + noise(weight)


class NoisyRate(keras.optimizers.schedules.LearningRateSchedule):
    """Draws from PyTorch's and NumPy's random numbers."""

    def __call__(self, step):
        return 0.05 * (1 + np.random.rand() + float(torch.rand(())))

    def get_config(self):
        return {}


def model(optimizer, units=3, **options):
    made = keras.Sequential([keras.Input((4,)), layers.Dense(units, **options), layers.Dense(2)])
    made.compile(optimizer, "mse")
    return made


DRAWING = {
    "an optimizer": (lambda: model(NoisySteps(0.05)), {}),
    "a constraint": (lambda: model("sgd", kernel_constraint=NoisyWeights()), {}),
    "a schedule": (lambda: model(keras.optimizers.SGD(NoisyRate())), {}),
    "an optimizer on sharded state": (
        lambda: model(NoisySteps(0.05), units=4096),
        {"state": "sharded"},
    ),
}


@pytest.mark.parametrize("what", DRAWING)
def test_an_update_draws_what_one_device_draws(what):
    build, options = DRAWING[what]
    one, many = both(build, **options)
    for made in (one, many):
        keras.utils.set_random_seed(5)
        made.fit(*data(), epochs=2, **QUIET)
        made.after = torch.rand(())  # the numbers go on as on one device
    assert_equal(one, many)
    assert one.after == many.after
    lockstep.release(many)


class Augmented(keras.utils.PyDataset):
    """Draws noise for its inputs by a function."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def __len__(self):
        return 4

    def __getitem__(self, number):
        x, y = data()
        rows = slice(number * 6, number * 6 + 6)
        return x[rows] + 0.1 * self.draw(x[rows].shape), y[rows]


def of_python(shape):
    return np.reshape([random.random() for _ in range(np.prod(shape))], shape)


def of_numpy(shape):
    return np.random.random(shape)


def of_keras(shape):
    return ops.convert_to_numpy(keras.random.uniform(shape, dtype="float64"))


def by_imported_functions(shape):
    return np.reshape([drawn() + random_sample() for _ in range(np.prod(shape))], shape)


GENERATORS = np.random.default_rng(3), np.random.RandomState(3), random.Random(3), torch.Generator()


def of_generators(shape):
    numpy, old, python, torchs = GENERATORS
    numbers = numpy.random(shape) + old.random_sample(shape) + python.random()
    return numbers + torch.rand((), generator=torchs).item()


class Drops(layers.Layer):
    """Scales by a number that it draws."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def call(self, x, training=False):
        return x * (1 + self.draw((1, 1)).item()) if training else x


@pytest.mark.parametrize(
    "draw", [of_python, of_numpy, of_keras, by_imported_functions, of_generators]
)
def test_data_and_code_of_the_model_draw_from_the_same_numbers(draw):
    def build():
        made = keras.Sequential([keras.Input((4,)), layers.Dense(3), Drops(draw), layers.Dense(2)])
        made.compile(keras.optimizers.SGD(0.05), "mse")
        return made

    one, many = both(build)
    before = list(map(state_of, GENERATORS))
    for made in (one, many):
        keras.utils.set_random_seed(5)
        for generator, state in zip(GENERATORS, before, strict=True):
            set_state(generator, state)
        made.fit(Augmented(draw), shuffle=False, verbose=0)
    assert_equal(one, many)
    lockstep.release(many)


def test_states_that_nobody_has_moved_are_not_sent(monkeypatch):
    sent = []
    plain = pool.Pool.send
    monkeypatch.setattr(
        pool.Pool, "send", lambda self, name, *rest: sent.append(name) or plain(self, name, *rest)
    )
    _, many = both(lambda: model("sgd"))
    many.fit(*data(), **QUIET)
    assert (sent.count("seeds"), sent.count("call")) == (1, 5)
    lockstep.release(many)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_in_a_process_of_a_launcher_draws_from_the_state_of_the_script(rank):
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    streams = RandomStreams()
    with streams.apart(b"base", rank):
        torch.rand(3)  # by a layer
        with streams.of_update():
            drawn = torch.rand(())
        torch.rand(3)
    assert [drawn, torch.rand(())] == expected.tolist()


class Drifts(keras.optimizers.SGD):
    """Has another rate in another process."""

    by = 1e-6

    def update_step(self, gradient, variable, learning_rate):
        rate = learning_rate * (1 + self.by * os.getpid())
        super().update_step(gradient, variable, rate)


class Rounds(Drifts):
    """Rounds otherwise in another process, as a norm of other threads does."""

    by = 1e-17


def test_weights_that_have_parted_are_an_error_at_the_end_of_the_epoch():
    _, many = both(lambda: model(Drifts(0.05)))
    with pytest.raises(
        ProcessesDisagree, match=r"dense.*/kernel' of .* differs by .* on replica 1"
    ):
        many.fit(*data(), **QUIET)
    lockstep.release(many)
    _, many = both(lambda: model(Rounds(0.05)))
    many.fit(*data(), **QUIET)
    lockstep.release(many)


# ------------------------------------------------------------------- the numbers of one device

ATTENTION = partial(layers.MultiHeadAttention, 2, 4, dropout=0.2)
NOISES = {
    "layers of noise": [
        partial(layers.Dropout, 0.3),
        partial(layers.Dropout, 0.3, seed=1),
        partial(layers.Dropout, 0.3, noise_shape=(1, 5, 8)),
        partial(layers.SpatialDropout1D, 0.2),
        partial(layers.GaussianNoise, 0.1),
        partial(layers.GaussianDropout, 0.1),
        ATTENTION,
    ],
    "on the whole batch": [
        partial(layers.AlphaDropout, 0.2),
        partial(layers.Dropout, 0.3, noise_shape=(None, 1, 8)),
        partial(layers.LSTM, 8, dropout=0.2, recurrent_dropout=0.1, return_sequences=True),
    ],
}


@pytest.mark.parametrize("state", ["replicated", *further("sharded")])
@pytest.mark.parametrize("name", NOISES)
def test_layers_draw_the_numbers_of_one_device_if_asked_to(name, state):
    """A row has the numbers of its place in the batch, and what is drawn next is the same too."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(23, 5, 4)), rng.integers(0, 3, 23)

    def build():
        inputs = keras.Input((5, 4))
        hidden = layers.Dense(8)(inputs)
        for make in NOISES[name]:
            hidden = make()(hidden, hidden) if make is ATTENTION else make()(hidden)
        made = keras.Model(inputs, layers.Dense(3)(layers.Flatten()(hidden)))
        made.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return made

    one, many = both(build, same_random_numbers=True, state=state)
    found = []
    for made in (one, many):
        keras.utils.set_random_seed(5)
        logs = made.fit(x, y, batch_size=7, epochs=2, verbose=0).history  # 7, 7, 7 and 2 rows
        found.append([logs, made.evaluate(x, y, verbose=0), float(torch.rand(()))])
    assert_equal(*found)
    assert_equal(one, many)
    lockstep.release(many)


def test_the_argument_for_random_numbers_is_true_or_false():
    with pytest.raises(TypeError, match="same_random_numbers='yes' was requested"):
        lockstep.distribute(keras.Sequential([layers.Dense(1)]), 1, same_random_numbers="yes")
