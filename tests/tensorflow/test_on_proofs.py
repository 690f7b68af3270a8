"""Which layers of the user's own are split, and the others are exact."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import lockstep
from lockstep.errors import UnsplitBatchWarning, UnsupportedModel
from tests.agreement import assert_equal, values
from tests.conformance.common import assert_same
from tests.replicas.proofs import *  # noqa: F403
from tests.replicas.proofs import Does, assert_same_fit, built, data, fit
from tests.tiers import every, rest

pytestmark = [
    pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning"),
    pytest.mark.usefixtures("first_steps_unchecked"),
]


def _branch_on_a_weight(layer, x):
    return tf.cond(tf.reduce_sum(layer.kernel) > 0, lambda: x * 2, lambda: tf.sin(x))


def _loop(layer, x):
    return tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, tf.tanh(a) + x), (0, x))[1]


def _asserts_that_shapes_agree(layer, x):
    return _asserting(tf.reduce_all(tf.shape(x * 2) == tf.shape(x)), x)


def _own_gradient(x):
    return tf.identity(x), lambda g: tf.clip_by_norm(g, 0.1)


DRAWS = {
    "layers of Keras that draw": lambda layer, x: layer.drop(x, training=True),
    "numbers drawn for each row": lambda layer, x: (
        x + keras.random.normal(ops.shape(x), seed=layer.seeds)
    ),
    "numbers drawn without a seed": lambda layer, x: x + keras.random.uniform((ops.shape(x)[0], 1)),
}
"""The random numbers of one device: PyTorch has those only if it is asked for them."""


NOT_FOLLOWED = {
    "a branch on a weight": _branch_on_a_weight,
    "a loop": _loop,
    "an assertion about shapes": _asserts_that_shapes_agree,
    "a function of TensorFlow's": lambda layer, x: tf.function(lambda y: y * 2, autograph=False)(x),
}
"""Row by row, in functions of TensorFlow's own, which are not followed."""


def _branch_on_a_value(layer, x):
    return tf.cond(tf.reduce_max(x) > 2.5, lambda: x * 0.5, lambda: x)


def _norm_by_hand(layer, x):
    mean, variance = tf.nn.moments(x, [0])
    return (x - mean) * tf.math.rsqrt(variance + 1e-3)


def _asserting(holds, x):
    with tf.control_dependencies([tf.Assert(holds, ["no"])]):
        return tf.identity(x)


ACROSS_BY_TENSORFLOW = {
    "a branch on a value": _branch_on_a_value,
    "statistics by hand": _norm_by_hand,
    "an assertion about the number of rows": lambda layer, x: _asserting(
        tf.shape(x)[0] % 11 == 0, x
    ),
}

ALONE = {
    "TensorFlow's random numbers": lambda layer, x: x + tf.random.uniform(tf.shape(x)),
    "one number without a seed": lambda layer, x: x + keras.random.uniform((1, 5)),
    "Python while it runs": lambda layer, x: tf.ensure_shape(
        tf.numpy_function(lambda y: y * 2, [x], tf.float32), (None, 5)
    ),
    "a custom gradient": lambda layer, x: tf.custom_gradient(_own_gradient)(x),
    "a number drawn in Python": lambda layer, x: x + np.random.normal(),
}


@pytest.mark.parametrize("what", every(2, DRAWS, quick=1))
def test_rows_that_draw_are_split(what):
    """A warning that it is not split would fail the test."""

    def left(devices):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(4)
        made = built(DRAWS[what])()
        if devices:
            lockstep.distribute(made, devices)
        return fit(made), values(made)

    assert_equal(left(2), left(None))


@pytest.mark.parametrize("what", every(4, NOT_FOLLOWED, quick=1))
def test_functions_of_tensorflow_see_the_whole_batch(what):
    with pytest.warns(UnsplitBatchWarning, match=r"Keras layers and keras.ops\)") as warned:
        assert_same_fit(built(NOT_FOLLOWED[what]), devices=2)
    assert any("declare the layer with lockstep.rowwise" in str(each.message) for each in warned)


@pytest.mark.parametrize("what", every(4, NOT_FOLLOWED, quick=1))
def test_a_layer_that_its_author_declares_is_split(what):
    """A warning that it is not split would fail the test."""

    def build():
        made = built(NOT_FOLLOWED[what])()
        assert lockstep.rowwise(made.get_layer("does")) is made.get_layer("does")
        return made

    assert_same_fit(build, devices=2)


@pytest.mark.parametrize("what", every(5, ACROSS_BY_TENSORFLOW, quick=1))
def test_what_looks_across_rows_by_tensorflow_sees_the_whole_batch(what):
    with pytest.warns(UnsplitBatchWarning, match=r"every device runs 'does' \("):
        assert_same_fit(built(ACROSS_BY_TENSORFLOW[what]))


@pytest.mark.parametrize("what", every(3, ALONE, quick=1))
def test_what_no_two_devices_do_alike_runs_on_the_first(what):
    made = lockstep.distribute(built(ALONE[what])(), 3)
    with pytest.warns(
        UnsplitBatchWarning, match=r"(has|calls|draws|is) .*so only the first device"
    ) as w:
        fit(made)
    (said,) = [str(each.message) for each in w if each.category is UnsplitBatchWarning]
    assert len(said.splitlines()) == 2
    for variable in made.variables:
        first, *others = [copy.numpy() for copy in variable.value.values]
        for other in others:
            np.testing.assert_array_equal(first, other)


@pytest.mark.whole
@pytest.mark.parametrize("what", ["a custom gradient", "Python while it runs"])
def test_what_the_first_device_runs_alone_is_exact(what):
    with pytest.warns(UnsplitBatchWarning):
        assert_same_fit(built(ALONE[what]), devices=2)


class Chooses(Does):
    """Python counts what it does, each time it is traced."""

    def build(self, shape):
        super().build(shape)
        self.other = self.add_weight(shape=(5, 5), name="other")
        self.drawn = 0

    def call(self, x, training=False):
        self.drawn += 1
        return self.what(self, x, self.drawn)


CHOICES = {
    "an option": lambda layer, x, n: tf.nn.leaky_relu(x, alpha=0.01 * n),
    "an order": lambda layer, x, n: tf.stack(
        (lambda parts: parts[n % 5 :] + parts[: n % 5])(tf.unstack(x, axis=1)), axis=1
    ),
    "a weight": lambda layer, x, n: x @ (layer.other if n % 2 else layer.kernel),
}


@pytest.mark.parametrize("choice", ["an order", *rest("an option", "a weight")])
def test_a_program_that_differs_in_its_wires_is_another_one(choice):
    made = keras.Sequential([keras.Input((5,)), Chooses(CHOICES[choice]), layers.Dense(2)])
    made.compile("sgd", "mse")
    lockstep.distribute(made, 3)
    with pytest.warns(UnsplitBatchWarning, match="a different program each time it is traced"):
        fit(made)


def _noisy_loss(y_true, y_pred):
    return ops.mean((y_true - y_pred) ** 2) * tf.random.uniform(())


def _noisy_metric(y_true, y_pred):
    return ops.mean(y_pred) + tf.random.uniform(())


@pytest.mark.parametrize("part", [{"loss": _noisy_loss}, {"metrics": [_noisy_metric]}])
def test_a_loss_or_metric_that_draws_runs_on_the_first_device(part):
    made = lockstep.distribute(built(lambda layer, x: x, **part)(), 2)
    with pytest.warns(UnsplitBatchWarning, match="draws random numbers or is stateful"):
        fit(made)


class Keeps(layers.Layer):
    """Keeps what it saw, for a loss outside of it."""

    def call(self, x):
        self.kept = x
        return x * 1.0


@pytest.mark.whole
def test_a_loss_that_uses_what_a_layer_keeps_is_exact():
    def make():
        keeps = Keeps()
        made = keras.Sequential([keras.Input((5,)), layers.Dense(5), keeps, layers.Dense(2)])
        made.compile("sgd", lambda y, p: ops.mean((y - p) ** 2) + ops.mean(keeps.kept**2))
        return made

    with pytest.warns(UnsplitBatchWarning, match="its loss uses a tensor that a layer stores"):
        assert_same_fit(make, devices=2)


def test_rows_that_only_the_running_step_counts_are_refused_in_words():
    def make():
        inputs = keras.Input((4,))
        kept = layers.Lambda(lambda t: tf.boolean_mask(t, t[:, 0] > 0), name="kept")(inputs)
        made = keras.Model(inputs, layers.Dense(2)(kept))
        made.compile("sgd", lambda y, p: ops.mean(p))
        return made

    made = lockstep.distribute(make(), 2)
    x = np.array([[1.0], [-1.0], [1.0], [1.0]], "float32") * np.ones((4, 4), "float32")
    with (
        pytest.warns(UnsplitBatchWarning, match="every device runs 'kept'"),
        pytest.raises(UnsupportedModel, match=r"'kept' .* merges the batch") as refused,
    ):
        made.fit(x, x, batch_size=4, verbose=0)
    assert str(refused.value).count("\n") < 3


def test_a_batch_norm_that_the_model_does_not_hold_runs_on_the_first_device():
    norms = []

    def make():
        norms.append(layers.BatchNormalization(name="unheld"))
        norm = norms[-1]
        norm.build((None, 5))
        return built(lambda layer, x: norm(x, training=True))()

    with pytest.warns(UnsplitBatchWarning, match="so only the first device"):
        assert_same_fit(make, devices=2)
    assert_same(*[norm.get_weights() for norm in norms])


def _words(**options):
    return layers.TextVectorization(vocabulary=list("abcdef"), **options)


_LETTERS = np.random.default_rng(0).choice(list("abcdef"), size=(44, 3))
TEXTS = np.array([" ".join(row[: 1 + n % 3]) for n, row in enumerate(_LETTERS)])[:, None]
NUMBERS = np.random.default_rng(1).integers(0, 9, size=(44, 6))
PREPARES = {
    "bins": (lambda: layers.Discretization([2.0, 5.0], output_mode="multi_hot"), NUMBERS),
    "categories": (lambda: layers.CategoryEncoding(9), NUMBERS),
    "hashes": (lambda: layers.Hashing(5, output_mode="count"), NUMBERS),
    "words": (lambda: _words(output_mode="multi_hot"), TEXTS),
    "a text of the longest row": (lambda: _words(), TEXTS),
    "sparse rows": (lambda: layers.Hashing(5, output_mode="count", sparse=True), NUMBERS),
    "rows of other lengths": (lambda: _words(ragged=True), TEXTS),
}
WHOLE = {
    "a text of the longest row": "text_vectorization",
    "sparse rows": "hashing.*returns a sparse or ragged tensor",
    "rows of other lengths": "text_vectorization.*returns a sparse or ragged tensor",
}


class AsDense(layers.Layer):
    def call(self, ragged):
        return ragged.to_tensor(shape=(None, 3))

    def compute_output_shape(self, shape):
        return (shape[0], 3)


@pytest.mark.parametrize("name", PREPARES)
def test_a_layer_that_prepares_data_is_split_if_rows_are_independent(name):
    prepare, x = PREPARES[name]

    def trained(devices):
        keras.utils.set_random_seed(4)
        inputs = keras.Input(x.shape[1:], dtype="string" if x is TEXTS else "int64")
        hidden = prepare()(inputs)
        if name == "rows of other lengths":
            hidden = AsDense()(hidden)
        if x is TEXTS and name != "words":
            hidden = layers.GlobalAveragePooling1D()(layers.Embedding(8, 3)(hidden))
        made = keras.Model(inputs, layers.Dense(2)(hidden))
        made.compile(keras.optimizers.SGD(0.02), "mse")
        if devices:
            lockstep.distribute(made, devices)
        made.fit(
            tf.data.Dataset.from_tensor_slices((x, data()[1])).batch(10), shuffle=False, verbose=0
        )
        return made.get_weights()

    said = pytest.warns(UnsplitBatchWarning, match=WHOLE.get(name))
    with said if name in WHOLE else contextlib.nullcontext():
        many = trained(3)
    assert_same(many, trained(0))
