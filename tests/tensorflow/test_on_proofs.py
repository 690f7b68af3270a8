"""Which layers of the user's own are split, and the others are exact."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import lockstep
from lockstep.errors import UnsplitBatchWarning, UnsupportedModel
from tests.conformance.common import assert_same
from tests.tiers import every, rest

pytestmark = [
    pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning"),
    pytest.mark.usefixtures("first_steps_unchecked"),
]


class Does(layers.Layer):
    """Does what it is told, and has a kernel, a table, and seeds to do it with."""

    def __init__(self, what, **kwargs):
        super().__init__(**kwargs)
        self.what = what
        self.seeds = keras.random.SeedGenerator(3)
        self.dense = layers.Dense(5, activation="silu")
        self.norm = layers.BatchNormalization()
        self.drop = layers.Dropout(0.5)
        self.lstm = layers.LSTM(5, return_sequences=True)

    def build(self, shape):
        self.dense.build((None, 5))
        self.norm.build((None, 5))
        self.lstm.build((None, None, 5))
        self.kernel = self.add_weight(shape=(5, 5), name="kernel")
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

    def call(self, x, training=False):
        return self.what(self, x)

    def compute_output_spec(self, x, training=False):
        return keras.KerasTensor((None, 5))


def _merged_and_back(layer, x):
    steps = ops.reshape(layer.dense(ops.reshape(x, (-1, 1)) * ops.ones((1, 5))), (-1, 5, 5))
    return ops.max(steps, axis=1)


def _heads(layer, x):
    rows = ops.shape(x)[0]
    split = ops.transpose(ops.reshape(x, (rows, 5, 1)) * ops.ones((1, 1, 4)), (0, 2, 1))
    scores = ops.softmax(ops.einsum("bhd,bkd->bhk", split, split) / 2.0)
    return ops.mean(ops.matmul(scores, split), axis=1)


def _positions(layer, x):
    steps = ops.repeat(x[:, None, :], 3, axis=1)
    places = ops.arange(3, dtype="float32")[None, :, None]
    return ops.sum(steps + places, axis=1)


def _counts_steps(layer, x):
    layer.seen.assign_add(1.0)
    return x * (1 + layer.seen)


def _branch_on_a_weight(layer, x):
    return tf.cond(tf.reduce_sum(layer.kernel) > 0, lambda: x * 2, lambda: tf.sin(x))


def _loop(layer, x):
    return tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, tf.tanh(a) + x), (0, x))[1]


def _asserts_that_shapes_agree(layer, x):
    return _asserting(tf.reduce_all(tf.shape(x * 2) == tf.shape(x)), x)


def _own_gradient(x):
    return tf.identity(x), lambda g: tf.clip_by_norm(g, 0.1)


ROW_BY_ROW = {
    "elementwise": lambda layer, x: ops.tanh(x) * 2 + ops.where(x > 0, x, -x),
    "a kernel and swish": lambda layer, x: ops.silu(x @ layer.kernel),
    "layers of Keras": lambda layer, x: layer.drop(layer.norm(layer.dense(x)), training=True),
    "an RNN of Keras": lambda layer, x: layer.lstm(x[:, None, :] * ops.ones((1, 4, 1)))[:, -1],
    "softmax over columns": lambda layer, x: ops.softmax(x, axis=-1) - ops.cumsum(x, axis=1),
    "layer norm by hand": lambda layer, x: (
        (x - ops.mean(x, -1, keepdims=True)) / ops.std(x, axis=-1, keepdims=True)
    ),
    "rows merged, and back": _merged_and_back,
    "attention by hand": _heads,
    "positions along a sequence": _positions,
    "a table looked up": lambda layer, x: ops.take(
        layer.kernel, ops.cast(ops.clip(x, 0, 4), "int32")[:, 0], axis=0
    ),
    "columns taken apart": lambda layer, x: ops.concatenate(ops.split(x, 5, axis=1)[::-1], axis=1),
    "the largest first": lambda layer, x: ops.top_k(x, 5)[0] + ops.flip(x, axis=1),
    "numbers drawn for each row": lambda layer, x: (
        x + keras.random.normal(ops.shape(x), seed=layer.seeds)
    ),
    "numbers drawn without a seed": lambda layer, x: x + keras.random.uniform((ops.shape(x)[0], 1)),
    "a counter of steps": _counts_steps,
    "zeros as many as rows": lambda layer, x: x + ops.zeros((ops.shape(x)[0], 5)),
}


NOT_FOLLOWED = {
    "a branch on a weight": _branch_on_a_weight,
    "a loop": _loop,
    "an assertion about shapes": _asserts_that_shapes_agree,
    "a function of TensorFlow's": lambda layer, x: tf.function(lambda y: y * 2, autograph=False)(x),
}
"""Row by row, in functions of TensorFlow's own, which are not followed."""


def _counts_rows(layer, x):
    layer.seen.assign_add(ops.cast(ops.shape(x)[0], "float32"))
    return x * layer.seen / 100


def _branch_on_a_value(layer, x):
    return tf.cond(tf.reduce_max(x) > 2.5, lambda: x * 0.5, lambda: x)


def _last_rows(layer, x):
    return ops.concatenate([x[:14], 0.5 * x[14:]], axis=0)


def _norm_by_hand(layer, x):
    mean, variance = tf.nn.moments(x, [0])
    return (x - mean) * tf.math.rsqrt(variance + 1e-3)


def _asserting(holds, x):
    with tf.control_dependencies([tf.Assert(holds, ["no"])]):
        return tf.identity(x)


def _adds_a_loss_of_rows(layer, x):
    layer.add_loss(ops.mean(x**2))
    return x


def test_an_attention_with_a_mask_for_all_rows_is_split():
    """A warning that it is not split would fail the test."""

    def make():
        keras.utils.set_random_seed(4)
        inputs = keras.Input((5,))
        steps = layers.Reshape((5, 1))(inputs)
        mask = np.tril(np.ones((5, 5), bool))
        steps = layers.MultiHeadAttention(2, 3)(steps, steps, attention_mask=mask)
        made = keras.Model(inputs, layers.Dense(2)(layers.Flatten()(steps)))
        made.compile(keras.optimizers.SGD(0.02), "mse")
        return made

    assert_same(fit(lockstep.distribute(make(), 2)), fit(make()))


ACROSS = {
    "rows from the fifteenth on": _last_rows,
    "a branch on a value": _branch_on_a_value,
    "a counter of rows": _counts_rows,
    "statistics by hand": _norm_by_hand,
    "a loss of rows": _adds_a_loss_of_rows,
    "the number of rows": lambda layer, x: x / ops.cast(ops.shape(x)[0], "float32"),
    "the number of a row": lambda layer, x: (
        x + ops.cast(ops.arange(ops.shape(x)[0]), "float32")[:, None] / 99
    ),
    "as many constants as rows": lambda layer, x: (
        x * ops.reshape((ops.arange(44 * 5, dtype="float32") / 220)[: ops.shape(x)[0] * 5], (-1, 5))
    ),
    "rows sorted": lambda layer, x: x + ops.sort(x, axis=0),
    "the first row": lambda layer, x: x - x[:1],
    "every second row, twice": lambda layer, x: x + 0.01 * ops.sum(x[::2]),
    "rows merged with columns": lambda layer, x: x * ops.mean(ops.reshape(x, (-1,))),
    "one number drawn for all rows": lambda layer, x: (
        x + keras.random.uniform((1, 5), seed=layer.seeds)
    ),
    "numbers drawn with a number for a seed": lambda layer, x: (
        x + keras.random.uniform(ops.shape(x), seed=3)
    ),
    "rows looked up": lambda layer, x: ops.take(x, ops.flip(ops.arange(ops.shape(x)[0])), axis=0),
    "an assertion about the number of rows": lambda layer, x: _asserting(
        tf.shape(x)[0] % 11 == 0, x
    ),
    "transposed": lambda layer, x: x @ layer.kernel + 0.01 * ops.sum(ops.transpose(x) @ x, axis=0),
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


def model(what, loss="mse", metrics=()):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(4)
    made = keras.Sequential(
        [keras.Input((5,)), layers.Dense(5, activation="tanh"), Does(what, name="does")]
    )
    made.add(layers.Dense(2))
    made.compile(keras.optimizers.SGD(0.02), loss, metrics=list(metrics))
    return made


def data(rows=44):
    rng = np.random.default_rng(1)
    return rng.normal(size=(rows, 5)).astype("float32"), rng.normal(size=(rows, 2)).astype(
        "float32"
    )


def fit(made, batch_size=22):
    made.fit(*data(), batch_size=batch_size, epochs=2, verbose=0, shuffle=False)
    every = [*made.variables, *made.optimizer.variables]
    return [keras.ops.convert_to_numpy(v) for v in every]


@pytest.mark.parametrize("what", every(5, ROW_BY_ROW, quick=1))
def test_what_works_row_by_row_is_split(what):
    """A warning that it is not split would fail the test."""
    many = fit(lockstep.distribute(model(ROW_BY_ROW[what]), 2))
    assert_same(many, fit(model(ROW_BY_ROW[what])))


@pytest.mark.parametrize("what", every(4, NOT_FOLLOWED, quick=1))
def test_functions_of_tensorflow_see_the_whole_batch(what):
    with pytest.warns(UnsplitBatchWarning, match=r"Keras layers and keras.ops\)") as warned:
        many = fit(lockstep.distribute(model(NOT_FOLLOWED[what]), 2))
    assert any("declare the layer with lockstep.rowwise" in str(each.message) for each in warned)
    assert_same(many, fit(model(NOT_FOLLOWED[what])))


@pytest.mark.parametrize("what", every(4, NOT_FOLLOWED, quick=1))
def test_a_layer_that_its_author_declares_is_split(what):
    """A warning that it is not split would fail the test."""
    made = model(NOT_FOLLOWED[what])
    assert lockstep.rowwise(made.get_layer("does")) is made.get_layer("does")
    assert_same(fit(lockstep.distribute(made, 2)), fit(model(NOT_FOLLOWED[what])))


@pytest.mark.parametrize("what", every(5, ACROSS, quick=1))
def test_what_looks_across_rows_sees_the_whole_batch(what):
    with pytest.warns(UnsplitBatchWarning, match=r"every device runs 'does' \("):
        many = fit(lockstep.distribute(model(ACROSS[what]), 3))
    assert_same(many, fit(model(ACROSS[what])))


@pytest.mark.parametrize("what", every(3, ALONE, quick=1))
def test_what_no_two_devices_do_alike_runs_on_the_first(what):
    made = lockstep.distribute(model(ALONE[what]), 3)
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
        many = fit(lockstep.distribute(model(ALONE[what]), 2))
    assert_same(many, fit(model(ALONE[what])))


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
    made = lockstep.distribute(model(lambda layer, x: x, **part), 2)
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
        keras.utils.set_random_seed(4)
        keeps = Keeps()
        made = keras.Sequential([keras.Input((5,)), layers.Dense(5), keeps, layers.Dense(2)])
        made.compile("sgd", lambda y, p: ops.mean((y - p) ** 2) + ops.mean(keeps.kept**2))
        return made

    with pytest.warns(UnsplitBatchWarning, match="its loss uses a tensor that a layer stores"):
        many = fit(lockstep.distribute(make(), 2))
    assert_same(many, fit(make()))


def test_a_layer_across_rows_with_a_regularizer_of_what_it_gives():
    def make():
        made = model(_norm_by_hand)
        made.get_layer("does").activity_regularizer = keras.regularizers.L2(0.1)
        return made

    with pytest.warns(UnsplitBatchWarning, match="'does'"):
        many = fit(lockstep.distribute(make(), 3))
    assert_same(many, fit(make()))


@pytest.mark.whole
def test_a_functional_model_that_was_never_called_is_split():
    """A warning fails the test."""

    def make():
        keras.utils.set_random_seed(11)
        inputs = keras.Input((5,))
        inner = keras.Model(inputs, inputs + layers.Dense(5, activation="tanh")(inputs))
        made = keras.Model(inputs, layers.Dense(2)(inner(inputs) * 2 + inputs))
        made.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")
        return made

    one, many = make(), lockstep.distribute(make(), 2)
    x, _ = data()
    mine, alone = (made.predict(x, batch_size=22, verbose=0) for made in (many, one))
    assert_same(mine, alone)
    assert_same(fit(many), fit(one))


@pytest.mark.parametrize("rows", [2, *rest(1, 5, 44)])
def test_predictions_of_any_number_of_rows(rows):
    made = lockstep.distribute(model(_last_rows), 3)
    x, _ = data(rows)
    with pytest.warns(UnsplitBatchWarning):
        mine = made.predict(x, batch_size=44, verbose=0)
    assert_same(mine, model(_last_rows).predict(x, batch_size=44, verbose=0))


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


def _minus_its_mean(hidden):
    return hidden - ops.mean(hidden, axis=0, keepdims=True)


def _merged(hidden):
    pairs = ops.reshape(layers.Dense(4)(hidden), (-1, 2))
    return ops.reshape(layers.Dense(3)(pairs), (-1, 6))


def _twice(hidden):
    there, back = ops.split(layers.Dense(3)(ops.concatenate([hidden, -hidden], axis=0)), 2)
    return there * back


@pytest.mark.parametrize("across", [_minus_its_mean, *rest(_twice, _merged)])
def test_a_first_dim_that_is_not_the_batch_runs_on_the_first_device(across):
    """Its shape says so before a step runs."""

    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        made = keras.Model(inputs, layers.Dense(2)(across(layers.Dense(3)(inputs))))
        made.compile("sgd", "mse")
        return made

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 4)).astype("float32"), rng.normal(size=(8, 2)).astype("float32")
    found = []
    for made in (make(), lockstep.distribute(make(), 2)):
        said = pytest.warns(UnsplitBatchWarning, match="is not the batch, so only the first device")
        with said if found else contextlib.nullcontext():
            made.fit(x, y, batch_size=4, verbose=0, shuffle=False)
        found.append([*made.get_weights(), made.predict(x, verbose=0)])
    assert_same(*found)


def _on_batches(made):
    x, y = data(28)
    history = [made.train_on_batch(x[i : i + 7], y[i : i + 7]) for i in range(0, 28, 7)]
    return [np.array(history), made.predict_on_batch(x[:7])]


def test_a_layer_that_looks_at_the_static_rows_of_a_batch_sees_those_of_one_device():
    def what(layer, x):
        return x / (x.shape[0] or 1)

    with pytest.warns(UnsplitBatchWarning, match="it reads the number of rows"):
        many = _on_batches(lockstep.distribute(model(what), 3))
    assert_same(many, _on_batches(model(what)))


def _centers(self, x, training=None):
    y = ops.matmul(x, self.kernel) + self.bias
    return y - ops.mean(y, axis=0)


def test_a_class_of_keras_with_another_call_is_not_known_by_its_name(monkeypatch):
    monkeypatch.setattr(layers.Dense, "call", _centers)
    with pytest.warns(UnsplitBatchWarning, match=r"dense.* \(Mean\)"):
        many = fit(lockstep.distribute(model(lambda layer, x: x), 3))
    assert_same(many, fit(model(lambda layer, x: x)))


@pytest.mark.whole
def test_float8_scales_by_the_whole_batch():
    def make():
        keras.utils.set_random_seed(2)
        made = keras.Sequential([keras.Input((5,)), layers.Dense(16), layers.Dense(2)])
        for layer in made.layers:
            layer.quantize("float8")
        made.compile(keras.optimizers.SGD(0.01), "mse")
        return made

    with pytest.warns(UnsplitBatchWarning, match="so only the first device"):
        many = fit(lockstep.distribute(make(), 3))
    assert_same(many, fit(make()))


def test_a_batch_norm_that_the_model_does_not_hold_runs_on_the_first_device():
    def make():
        norm = layers.BatchNormalization(name="unheld")
        norm.build((None, 5))
        return norm, model(lambda layer, x: norm(x, training=True))

    (norm, one), (of_many, many) = make(), make()
    with pytest.warns(UnsplitBatchWarning, match="so only the first device"):
        several = fit(lockstep.distribute(many, 2))
    assert_same([*several, *of_many.get_weights()], [*fit(one), *norm.get_weights()])


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
