"""Which layers and models of the user's own are split on PyTorch; all are exact."""

import itertools
import warnings

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import lockstep
from lockstep.engines.replicas import rows_of_losses
from lockstep.engines.torch.first_step import row_proofs
from lockstep.engines.torch.ranks import step_plans
from lockstep.errors import UnsplitBatchWarning, UnsupportedModel
from tests.agreement import assert_equal, both
from tests.replicas.proofs import *  # noqa: F403
from tests.replicas.proofs import Does, assert_same_fit, built, data, fit
from tests.tiers import every, further, rest

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")


class Holds(Does):
    """Holds a counter and a tensor of PyTorch too."""

    def __init__(self, what, **kwargs):
        super().__init__(what, **kwargs)
        self.calls = 0
        self.table = torch.arange(25.0, dtype=torch.float64).reshape(5, 5) / 25


OF_PYTORCH = {
    "a tensor of PyTorch first": lambda layer, x: (
        layer.table[1] * x - layer.table[0, 0] / (x * x + 1)
    ),
    "a tensor that it keeps": lambda layer, x: ops.matmul(x, layer.table),
}


@pytest.mark.parametrize("what", every(2, OF_PYTORCH))
def test_what_works_row_by_row_with_tensors_of_pytorch_is_split(what):
    """A warning that it is not split would fail the test."""
    assert_same_fit(built(OF_PYTORCH[what], Holds))


def _branches_on_a_weight(layer, x):
    return x * 2 if ops.sum(layer.kernel) > 100 else x - ops.mean(x, axis=0)


def _reads_a_weight(layer, x):
    return x * 2 if ops.convert_to_numpy(layer.kernel).sum() > 100 else x - ops.mean(x, axis=0)


def _counts_calls(layer, x):
    layer.calls += 1
    return x * 2 if layer.calls < 10 else x - ops.mean(x, axis=0)


def _catches(layer, x):
    try:
        positive = bool(ops.sum(layer.kernel) > 100)
    except Exception:
        positive = True
    return x * 2 if positive else x - ops.mean(x, axis=0)


def _writes_a_tensor(layer, x):
    layer.table.add_(0.001)
    return ops.matmul(x, layer.table)


def _writes_part_of_a_tensor(layer, x):
    layer.table.view(-1)[3:].add_(0.001)
    return ops.matmul(x, layer.table)


def _norm_in_a_closure():
    norm = layers.BatchNormalization(name="unheld")
    norm.build((None, 5))
    return lambda layer, x: norm(x, training=True)


WHOLE = {
    "a branch on a symbolic tensor": (
        lambda layer, x: x if keras.utils.is_keras_tensor(x) else x - ops.mean(x, axis=0),
        "Mean",
    ),
    "a branch on a class": (
        lambda layer, x: x - ops.mean(x, axis=0) if isinstance(x, torch.Tensor) else x,
        "asks whether a tensor is symbolic",
    ),
    "a branch on an attribute": (
        lambda layer, x: x - ops.mean(x, axis=0) if hasattr(x, "requires_grad") else x,
        "reads 'requires_grad' of a tensor",
    ),
    "a batch norm in a closure": (_norm_in_a_closure(), "'unheld', which is not part of the model"),
    "a function of PyTorch": (lambda layer, x: torch.sin(x), "functions other than Keras layers"),
    "statistics by hand": (lambda layer, x: x - ops.mean(x, axis=0), "Mean"),
    "a branch on a weight": (_branches_on_a_weight, "reads the value"),
    "a weight read by NumPy": (_reads_a_weight, "reads the value"),
    "an error that it catches": (_catches, "reads the value"),
    "a counter of calls": (_counts_calls, "(a call changes its attributes|Mean)"),
    "a tensor that it writes": (_writes_a_tensor, "writes into a tensor from outside"),
    "a part that it writes": (_writes_part_of_a_tensor, "writes into a tensor from outside"),
    "random numbers of PyTorch": (
        lambda layer, x: x + 0 * torch.rand(5, dtype=torch.float64),
        "random numbers of PyTorch",
    ),
}


@pytest.mark.parametrize("what", every(2, WHOLE))
def test_what_is_not_known_runs_whole(what):
    function, reason = WHOLE[what]
    with pytest.warns(UnsplitBatchWarning, match=rf"every device runs 'does' \(.*{reason}") as said:
        assert_same_fit(built(function, Holds))
    assert any("declare the layer with lockstep.rowwise" in str(each.message) for each in said)


def test_a_layer_that_draws_numbers_of_pytorch_is_not_said_to_be_exact():
    made = lockstep.distribute(built(lambda layer, x: x + torch.rand(5, dtype=x.dtype))(), 2)
    with pytest.warns(UnsplitBatchWarning, match="random numbers of PyTorch") as said:
        fit(made)
    assert not any("exact" in str(each.message) for each in said)
    lockstep.release(made)


def _merged():
    """The copies in a row are rows of a model inside, as those of video frames or patches are."""
    of_copy = keras.Sequential([keras.Input((4,)), layers.BatchNormalization(), layers.Dense(3)])
    x = keras.Input((2, 4))
    merged = of_copy(ops.reshape(x, (-1, 4)))
    made = keras.Model(x, ops.reshape(merged, (-1, 6)), name="merged")
    made.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=["mae"])
    return made


def test_rows_that_are_merged_run_on_one_device():
    """They ended in an error. TensorFlow runs them so, too."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(41, 2, 4)), rng.normal(size=(41, 6))
    said = r"output of layer 'reshape\w*' \(Reshape\) of shape \(20, 4\) for 10 rows,\nso only the"
    with pytest.warns(UnsplitBatchWarning, match=said):
        assert_same_fit(_merged, x, y, batch_size=10)


def test_rows_that_are_merged_leave_sharded_state_as_it_is():
    keras.utils.clear_session(free_memory=False)
    made = lockstep.distribute(_merged(), devices=2, state="sharded")
    before = made.get_weights()
    with pytest.raises(UnsupportedModel, match=r"of shape \(20, 4\) for 10 rows,\nso one device"):
        made.fit(np.ones((10, 2, 4)), np.ones((10, 6)), verbose=0)
    assert all(map(np.array_equal, made.get_weights(), before))
    lockstep.release(made)


class Measures(layers.Layer):
    """Updates a metric of its own in its call."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.share = keras.metrics.Mean(name="share")

    def call(self, x):
        self.share.update_state(ops.mean(x, axis=-1), sample_weight=1 + ops.abs(x[:, 0]))
        return x


@lockstep.rowwise
class MeasuresRows(Measures):
    pass


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (
            Measures,
            r"'measures' \(its call updates the metric 'share'\) of .*\n.*let only compile or",
        ),
        (MeasuresRows, r"'share' differs by .* \(remove lockstep.rowwise from 'measures', whose"),
    ],
)
def test_the_advice_for_a_metric_in_a_call_fits(layer, said):
    def build():
        made = keras.Sequential([keras.Input((5,)), layer(name="measures"), layers.Dense(2)])
        made.compile("sgd", "mse")
        return made

    with pytest.warns(UnsplitBatchWarning, match=said) as found:
        assert_same_fit(build)
    assert not any("declare the layer" in str(each.message) for each in found)


def _centers_after(layer, given, outputs):
    return outputs - torch.mean(outputs, dim=0)


def test_the_hooks_of_a_layer_see_the_whole_batch():
    def build():
        made = built(lambda layer, x: x * 2)()
        made.layers[0].register_forward_hook(_centers_after)
        return made

    with pytest.warns(UnsplitBatchWarning, match="has a hook or parametrization of PyTorch"):
        assert_same_fit(build)


def test_a_declared_layer_is_split():
    def build():
        made = built(lambda layer, x: torch.sin(x))()
        lockstep.rowwise(made.get_layer("does"))
        return made

    assert_same_fit(build)


class Towers(keras.Model):
    """Two towers with a call of its own, over a table that both use."""

    def __init__(self, across=False):
        super().__init__()
        self.across = across
        self.table = layers.Embedding(9, 6, mask_zero=True)
        self.attend = layers.MultiHeadAttention(2, 3)
        self.norm = layers.BatchNormalization()
        self.pool = layers.GlobalAveragePooling1D()
        self.ends = [layers.Dense(4, activation="tanh"), layers.Dense(4)]

    def call(self, inputs, training=False):
        one = self.table(inputs["one"])
        one = self.pool(self.norm(self.attend(one, one), training=training))
        other = self.pool(self.table(inputs["other"]))
        one, other = self.ends[0](one), self.ends[1](other)
        if self.across:
            other = other - ops.mean(other, axis=0)
        return ops.sum(one * other, axis=-1, keepdims=True)


def towers(across=False):
    made = Towers(across)
    made({"one": np.ones((1, 7), "int32"), "other": np.ones((1, 4), "int32")})  # builds it
    made.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return made


def sequences():
    rng = np.random.default_rng(2)
    x = {name: rng.integers(0, 9, (41, length)) for name, length in (("one", 7), ("other", 4))}
    return x, rng.normal(size=(41, 1))


@pytest.mark.parametrize("devices", [3, *rest(2)])
def test_a_model_with_a_call_of_its_own_is_split(devices):
    """A warning that it is not split would fail the test."""
    assert_same_fit(towers, *sequences(), devices=devices, batch_size=10)


def test_a_model_that_looks_across_rows_has_its_layers_shared():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsplitBatchWarning)
        assert_same_fit(lambda: towers(across=True), *sequences(), batch_size=10)


NUMBERS = []


def _numbered(layer, x):
    return x * next(NUMBERS[-1])


def test_following_draws_from_no_iterator_of_the_script():
    one, many = both(built(_numbered))
    found = []
    for made in (one, many):
        NUMBERS.append(itertools.count(1.0, 0.1))
        with warnings.catch_warnings(action="ignore", category=UnsplitBatchWarning):
            found.append(fit(made))
    assert_equal(*found)
    assert_equal(one, many)
    lockstep.release(many)


def test_a_changed_attribute_is_followed_again():
    one, many = both(towers, 2)
    for made in (one, many):
        fit(made, *sequences(), batch_size=10)
        made.across = True
    fit(many, *sequences(), batch_size=10)
    fit(one, *sequences(), batch_size=10)
    assert_equal(many, one)
    lockstep.release(many)


def test_verify_draws_the_numbers_of_one_device_in_a_model_that_is_split():
    class Drops(keras.Model):
        def __init__(self):
            super().__init__()
            self.ends = [layers.Dense(6, activation="tanh"), layers.Dense(2)]
            self.drop = layers.Dropout(0.4, seed=5)

        def call(self, x, training=False):
            return self.ends[1](self.drop(self.ends[0](x), training=training))

    keras.utils.set_random_seed(3)
    made = Drops()
    made(np.ones((1, 5)))
    made.compile("sgd", "mse")
    found = lockstep.verify(made, data(), devices=3, steps=4, batch_size=10)
    assert found.equal, found.cause
    assert found.notes == ()


def _clipped(layer, x):
    """Clip the gradient of all rows by their norm, as `keras.ops` knows it."""

    @ops.custom_gradient
    def identity(x):
        def grad(*args, upstream=None):
            norm = ops.sqrt(ops.sum(upstream * upstream))
            return upstream * ops.minimum(1.0, 0.1 / norm)

        return x, grad

    return identity(x)


def _hooked(layer, x):
    if x.requires_grad:
        x = x * 1.0
        x.register_hook(lambda gradient: gradient * min(1.0, 0.1 / float(gradient.norm())))
    return x


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (0.1 / gradient.norm()).clamp(max=1.0)


def _own_function(layer, x):
    return _Clip.apply(x)


def _reversed(layer, x):
    @ops.custom_gradient
    def identity(x):
        def grad(*args, upstream=None):
            return -0.5 * upstream

        return x, grad

    return identity(x)


@pytest.mark.parametrize("what", [_reversed, *further(_clipped, _hooked, _own_function)])
def test_code_that_acts_on_a_gradient_has_that_of_all_rows_or_works_row_by_row(what):
    def build():
        made = keras.Sequential(
            [keras.Input((5,)), layers.Dense(5), Does(what, name="does"), layers.Dense(1)],
            name="acts",
        )
        made.compile(keras.optimizers.SGD(0.05), "mse")
        return made

    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(22, 5)), rng.normal(size=(22, 1))
    y[8:] += 8  # the gradient of the first batch is small
    one, many = both(build)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UnsplitBatchWarning)
        for made in (one, many):
            made.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert_equal(one, many)
    told = any("a gradient inside layer 'does'" in str(each.message) for each in said)
    assert told == (what is not _reversed)


# ------------------------------------------------------------------- lengths of sequences


def transformer(*own):
    """A text classifier with residuals, and layers of one's own."""
    tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(9, 8, mask_zero=True)(tokens)
    h = layers.MultiHeadAttention(2, 4)(x, x)
    for layer in own:
        h = layer(h)
    h = layers.LayerNormalization()(x + h * 0.5)
    h = ops.concatenate([h[:, :, :4], ops.relu(h[:, :, 4:])], axis=-1)
    made = keras.Model(tokens, layers.Dense(9)(h))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return made


class Doubles(layers.Layer):
    """Asks for the length of its inputs."""

    supports_masking = True

    def call(self, x):
        return x * (x.shape[1] / x.shape[1] + 1.0)


@pytest.mark.filterwarnings("error::lockstep.errors.UnsplitBatchWarning")
@pytest.mark.parametrize("own", [0, *further(1)])
def test_a_new_length_is_proven_for_code_of_the_users_own_alone(own, monkeypatch):
    counts = {"proofs": 0, "comparisons": 0, "losses": 0}

    def counted(name, plain):
        def run(*args, **kwargs):
            counts[name] += 1
            return plain(*args, **kwargs)

        return run

    monkeypatch.setattr(row_proofs, "_reasons", counted("proofs", row_proofs._reasons))
    monkeypatch.setattr(step_plans, "compare", counted("comparisons", step_plans.compare))
    follow = counted("losses", rows_of_losses.function_refused)
    monkeypatch.setattr(rows_of_losses, "function_refused", follow)
    one, many = both(lambda: transformer(*(Doubles() for _ in range(own))))
    for length in range(2, 22):
        tokens = np.random.default_rng(length).integers(0, 9, size=(7, length))
        logs = [made.train_on_batch(tokens, tokens) for made in (one, many)]
        assert_equal(*logs)
    assert_equal(one, many)
    assert counts["proofs"] == 20 * own
    assert counts["comparisons"] == (20 if own else len([2, 4, 8, 16]))  # by their numbers
    assert counts["losses"] <= 2
    lockstep.release(many)
