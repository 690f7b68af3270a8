"""Old layers give in Keras 3 what they gave: compared with NumPy, written from the old rules."""

import json

import h5py
import keras
import numpy as np
import pytest

import lockstep
from tests.rescue import old_files
from tests.rescue.old_files import lstm, numbers, old_hard_sigmoid, sigmoid


def gru_reset_before(x, kernel, recurrent, bias, gate):
    units = recurrent.shape[0]
    h = np.zeros((len(x), units), "float32")
    for t in range(x.shape[1]):
        xz, xr, xh = np.split(x[:, t] @ kernel + bias, 3, axis=1)
        rz, rr, rh = np.split(recurrent, 3, axis=1)
        z, r = gate(xz + h @ rz), gate(xr + h @ rr)
        h = z * h + (1 - z) * np.tanh(xh + (r * h) @ rh)
    return h


def cudnn_blocks(matrix, gates):
    """CuDNN kept each gate's matrix as (outputs, inputs), in the room of (inputs, outputs)."""
    return [b.reshape(b.shape[1], b.shape[0]) for b in np.split(matrix, gates, axis=1)]


def cudnn_lstm(x, kernel, recurrent, bias):
    w, r = cudnn_blocks(kernel, 4), cudnn_blocks(recurrent, 4)
    bw, br = np.split(bias[: len(bias) // 2], 4), np.split(bias[len(bias) // 2 :], 4)
    h = c = np.zeros((len(x), recurrent.shape[0]), "float32")
    for t in range(x.shape[1]):
        i, f, g, o = (x[:, t] @ w[k].T + bw[k] + h @ r[k].T + br[k] for k in range(4))
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
    return h


def cudnn_gru(x, kernel, recurrent, bias):
    w, r = cudnn_blocks(kernel, 3), cudnn_blocks(recurrent, 3)
    bw, br = np.split(bias[: len(bias) // 2], 3), np.split(bias[len(bias) // 2 :], 3)
    h = np.zeros((len(x), recurrent.shape[0]), "float32")
    for t in range(x.shape[1]):
        z = sigmoid(x[:, t] @ w[0].T + bw[0] + h @ r[0].T + br[0])
        reset = sigmoid(x[:, t] @ w[1].T + bw[1] + h @ r[1].T + br[1])
        new = np.tanh(x[:, t] @ w[2].T + bw[2] + reset * (h @ r[2].T + br[2]))
        h = z * h + (1 - z) * new
    return h


def rescued(tmp_path, layers, shape, weights, **kwargs):
    """A parallel file with these layers and weights, rescued and loaded with plain Keras."""
    template = old_files.sequential(layers, shape)
    old = old_files.parallel_full(tmp_path / "old.h5", template, weights, shapes=(shape,))
    lockstep.rescue(old, tmp_path / "new.keras", **kwargs)
    return keras.models.load_model(tmp_path / "new.keras")


def test_cudnn_lstm_becomes_an_lstm_with_the_same_outputs(tmp_path):
    x, weights = numbers(2, 5, 3), [numbers(3, 16), numbers(4, 16), numbers(32)]
    named = list(zip(_names("cu_dnnlstm_1"), weights, strict=True))
    model = rescued(tmp_path, [("CuDNNLSTM", {"units": 4, "name": "cu_dnnlstm_1"})],
                    (None, 5, 3), named)  # fmt: skip
    np.testing.assert_allclose(model(x), cudnn_lstm(x, *weights), atol=2e-6)


def test_cudnn_gru_becomes_a_gru_with_the_same_outputs(tmp_path):
    x, weights = numbers(2, 5, 3), [numbers(3, 12), numbers(4, 12), numbers(24)]
    named = list(zip(_names("cu_dnngru_1"), weights, strict=True))
    model = rescued(tmp_path, [("CuDNNGRU", {"units": 4, "name": "cu_dnngru_1"})],
                    (None, 5, 3), named)  # fmt: skip
    np.testing.assert_allclose(model(x), cudnn_gru(x, *weights), atol=2e-6)


def test_bidirectional_cudnn_keeps_both_directions(tmp_path):
    x = numbers(2, 5, 3)
    forward = [numbers(3, 16), numbers(4, 16), numbers(32)]
    backward = [numbers(3, 16), numbers(4, 16), numbers(32)]
    named = [
        *zip(_names("bidirectional_1/forward_cu"), forward, strict=True),
        *zip(_names("bidirectional_1/backward_cu"), backward, strict=True),
    ]
    inner = {"class_name": "CuDNNLSTM", "config": {"name": "cu", "units": 4}}
    model = rescued(
        tmp_path,
        [("Bidirectional", {"name": "bidirectional_1", "layer": inner, "merge_mode": "concat"})],
        (None, 5, 3),
        named,
    )
    wanted = np.concatenate([cudnn_lstm(x, *forward), cudnn_lstm(x[:, ::-1], *backward)], axis=1)
    np.testing.assert_allclose(model(x), wanted, atol=2e-6)


def test_cudnn_weights_load_into_a_live_lstm(tmp_path):
    x, weights = numbers(2, 5, 3), [numbers(3, 16), numbers(4, 16), numbers(32)]
    named = list(zip(_names("cu_dnnlstm_1"), weights, strict=True))
    old = old_files.parallel_weights(tmp_path / "old.h5", named, merges=("cu_dnnlstm_1",))
    model = keras.Sequential([keras.Input((5, 3)), keras.layers.LSTM(4)])
    report = lockstep.load_weights(model, old)
    assert [row.converted for row in report.rows] == [True] * 3
    np.testing.assert_allclose(model(x), cudnn_lstm(x, *weights), atol=2e-6)


@pytest.mark.parametrize("gate", ["hard_sigmoid", "sigmoid", None])
def test_lstm_gates_are_those_of_keras_2(tmp_path, gate):
    x, weights = 3 * numbers(2, 5, 3), [numbers(3, 16), numbers(4, 16), numbers(16)]
    config = {"units": 4, "name": "lstm_1", "implementation": 1}
    if gate:
        config["recurrent_activation"] = gate
    named = list(zip(_names("lstm_1"), weights, strict=True))
    model = rescued(tmp_path, [("LSTM", config)], (None, 5, 3), named)
    rule = sigmoid if gate == "sigmoid" else old_hard_sigmoid
    np.testing.assert_allclose(model(x), lstm(x, *weights, rule)[:, -1], atol=2e-6)


def test_gru_without_reset_after_in_its_config_resets_before(tmp_path):
    x, weights = 3 * numbers(2, 5, 3), [numbers(3, 12), numbers(4, 12), numbers(12)]
    config = {"units": 4, "name": "gru_1", "recurrent_activation": "hard_sigmoid"}
    named = list(zip(_names("gru_1"), weights, strict=True))
    model = rescued(tmp_path, [("GRU", config)], (None, 5, 3), named)
    np.testing.assert_allclose(model(x), gru_reset_before(x, *weights, old_hard_sigmoid), atol=2e-6)


def test_hard_sigmoid_of_other_layers_is_keras_2s_too(tmp_path):
    x, kernel, bias = 4 * numbers(6, 4), numbers(4, 3), numbers(3)
    model = rescued(
        tmp_path,
        [
            ("Dense", {"units": 3, "activation": "hard_sigmoid", "name": "d"}),
            ("Activation", {"activation": "hard_sigmoid", "name": "a"}),
        ],
        (None, 4),
        [("d/kernel:0", kernel), ("d/bias:0", bias)],
    )
    wanted = old_hard_sigmoid(old_hard_sigmoid(x @ kernel + bias))
    np.testing.assert_allclose(model(x), wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "rule"),
    [
        (("LeakyReLU", {"alpha": 0.3}), lambda x: np.where(x > 0, x, 0.3 * x)),
        (("LeakyReLU", {"alpha": {"type": "ndarray", "value": 0.1}}),
         lambda x: np.where(x > 0, x, 0.1 * x)),
        (("ThresholdedReLU", {"theta": 0.5}), lambda x: np.where(x > 0.5, x, 0)),
        (("ELU", {"alpha": 0.7}), lambda x: np.where(x > 0, x, 0.7 * np.expm1(x))),
        (("ReLU", {"max_value": 0.9, "negative_slope": 0.0, "threshold": 0.0}),
         lambda x: np.clip(x, 0, 0.9)),
        (("Softmax", {"axis": -1}),
         lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)),
        (("Reshape", {"target_shape": [3, 1]}), lambda x: x.reshape(-1, 3, 1)),
        (("RepeatVector", {"n": 2}), lambda x: np.stack([x, x], axis=1)),
        (("GaussianNoise", {"stddev": 0.5}), lambda x: x),
        (("Dropout", {"rate": 0.5, "noise_shape": None, "seed": None}), lambda x: x),
        (("ActivityRegularization", {"l1": 0.1, "l2": 0.0}), lambda x: x),
        (("Masking", {"mask_value": 0.0}), lambda x: x),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_layers_without_weights_compute_what_they_did(tmp_path, layer, rule):
    x, kernel, bias = numbers(6, 4), numbers(4, 3), numbers(3)
    name, config = layer
    model = rescued(
        tmp_path,
        [("Dense", {"units": 3, "name": "d"}), (name, {"name": "after", **config})],
        (None, 4),
        [("d/kernel:0", kernel), ("d/bias:0", bias)],
    )
    np.testing.assert_allclose(model(x), rule(x @ kernel + bias), atol=2e-6)


def test_every_way_to_write_an_old_setting_is_taken(tmp_path):
    x, kernel, bias = numbers(6, 4), numbers(4, 3), numbers(3)
    config = {
        "units": 3,
        "name": "d",
        "dtype": {"class_name": "Policy", "config": {"name": "float32"}},
        "kernel_initializer": {
            "class_name": "VarianceScaling",
            "config": {"scale": 1.0, "mode": "fan_avg", "distribution": "normal", "seed": None},
        },
        "bias_initializer": {"class_name": "Zeros", "config": {"dtype": "float32"}},
        "kernel_regularizer": {"class_name": "L1L2", "config": {"l1": 0.0, "l2": 0.01}},
        "kernel_constraint": {"class_name": "MaxNorm", "config": {"max_value": 2, "axis": 0}},
        "bias_constraint": None,
        "activity_regularizer": None,
    }
    model = rescued(tmp_path, [("Dense", config)], (None, 4),
                    [("d/kernel:0", kernel), ("d/bias:0", bias)])  # fmt: skip
    np.testing.assert_allclose(model(x), x @ kernel + bias, atol=1e-6)
    assert model.layers[0].kernel_regularizer.l2 == pytest.approx(0.01)
    assert model.layers[0].kernel_constraint.max_value == 2


def test_an_argument_that_keras_3_lost_is_refused_not_dropped(tmp_path):
    config = {"name": "b", "axis": -1, "virtual_batch_size": 4, "momentum": 0.9, "epsilon": 1e-3}
    with pytest.raises(lockstep.errors.UntranslatableModel, match="virtual_batch_size=4"):
        rescued(tmp_path, [("BatchNormalization", config)], (None, 4),
                [("b/gamma:0", numbers(4))])  # fmt: skip


@pytest.mark.parametrize("gone", ["LocallyConnected1D", "TensorFlowOpLayer", "TFOpLambda"])
def test_layers_that_are_gone_say_so(tmp_path, gone):
    with pytest.raises(lockstep.errors.UntranslatableModel, match=gone):
        rescued(tmp_path, [(gone, {"name": "x"})], (None, 4), [("x/kernel:0", numbers(4))])


def test_lambdas_of_the_template_take_the_users_function_by_layer_name(tmp_path):
    x, kernel, bias = numbers(6, 4), numbers(4, 3), numbers(3)
    layers = [
        ("Dense", {"units": 3, "name": "d"}),
        ("Lambda", {"name": "double", "function": ["AAAA", None, None],
                    "function_type": "lambda", "arguments": {}}),
    ]  # fmt: skip
    weights = [("d/kernel:0", kernel), ("d/bias:0", bias)]
    with pytest.raises(lockstep.errors.NeedsCode, match="'double'"):
        rescued(tmp_path, layers, (None, 4), weights)
    old = tmp_path / "old.h5"
    doubled = keras.saving.register_keras_serializable("tests")(lambda_double)
    lockstep.rescue(old, tmp_path / "new.keras", custom_objects={"double": doubled})
    model = keras.models.load_model(tmp_path / "new.keras")
    np.testing.assert_allclose(model(x), 2 * (x @ kernel + bias), atol=2e-6)


def lambda_double(x):
    return 2 * x


def test_a_shared_layer_and_a_nested_model_keep_their_calls(tmp_path):
    """Keras 2 numbers calls of a nested model from 1, of a layer from 0."""
    kernel, bias = numbers(4, 4), numbers(4)
    inner = {
        "class_name": "Model",
        "name": "tower",
        "config": {
            "name": "tower",
            "layers": [
                _input("inner_in", (None, 4)),
                {"class_name": "Dense", "name": "shared", "inbound_nodes":
                 [[["inner_in", 0, 0, {}]]],
                 "config": {"name": "shared", "units": 4, "activation": "tanh"}},
            ],
            "input_layers": [["inner_in", 0, 0]],
            "output_layers": [["shared", 0, 0]],
        },
    }  # fmt: skip
    template = {
        "class_name": "Model",
        "config": {
            "name": "model_1",
            "layers": [
                _input("a", (None, 4)),
                _input("b", (None, 4)),
                {**inner, "inbound_nodes": [[["a", 0, 0, {}]], [["b", 0, 0, {}]]]},
                {"class_name": "Subtract", "name": "minus", "config": {"name": "minus"},
                 "inbound_nodes": [[["tower", 2, 0, {}], ["tower", 1, 0, {}]]]},
            ],
            "input_layers": [["a", 0, 0], ["b", 0, 0]],
            "output_layers": [["minus", 0, 0]],
        },
    }  # fmt: skip
    old = old_files.parallel_full(
        tmp_path / "old.h5", template, [("shared/kernel:0", kernel), ("shared/bias:0", bias)],
        inputs=("a", "b"), shapes=((None, 4), (None, 4)), devices=3,
    )  # fmt: skip
    report = lockstep.rescue(old, tmp_path / "new.keras")
    assert report.devices == 3
    model = keras.models.load_model(tmp_path / "new.keras")
    a, b = numbers(5, 4), numbers(5, 4)
    wanted = np.tanh(b @ kernel + bias) - np.tanh(a @ kernel + bias)
    np.testing.assert_allclose(model([a, b]), wanted, atol=1e-6)


def test_time_distributed_models_and_layers(tmp_path):
    kernel, bias, kernel2, bias2 = numbers(4, 3), numbers(3), numbers(3, 2), numbers(2)
    inner = {"class_name": "Sequential", "config": [
        {"class_name": "Dense", "config": {"name": "f_dense", "units": 3, "activation": "tanh",
                                           "batch_input_shape": [None, 4]}}]}  # fmt: skip
    plain = {"class_name": "Dense", "config": {"name": "dense_9", "units": 2}}
    model = rescued(
        tmp_path,
        [
            ("TimeDistributed", {"name": "td_1", "layer": inner}),
            ("TimeDistributed", {"name": "td_2", "layer": plain}),
        ],
        (None, 5, 4),
        [("f_dense/kernel:0", kernel), ("f_dense/bias:0", bias),
         ("td_2/kernel:0", kernel2), ("td_2/bias:0", bias2)],
    )  # fmt: skip
    x = numbers(2, 5, 4)
    np.testing.assert_allclose(model(x), np.tanh(x @ kernel + bias) @ kernel2 + bias2, atol=2e-6)


def _names(prefix):
    return [f"{prefix}/{kind}:0" for kind in ("kernel", "recurrent_kernel", "bias")]


def _input(name, shape):
    config = {"name": name, "batch_input_shape": list(shape), "dtype": "float32"}
    return {"class_name": "InputLayer", "name": name, "inbound_nodes": [], "config": config}


def test_no_config_leaves_a_trace_of_the_wrapper(tmp_path):
    old = old_files.parallel_full(
        tmp_path / "old.h5",
        old_files.sequential([old_files.dense(3)], (None, 4)),
        [("dense_1/kernel:0", numbers(4, 3)), ("dense_1/bias:0", numbers(3))],
    )
    lockstep.rescue(old, tmp_path / "new.keras")
    config = json.dumps(keras.models.load_model(tmp_path / "new.keras").get_config())
    assert "Lambda" not in config
    assert "lambda" not in config


@pytest.mark.parametrize("name", ["gelu", "mish", "my_activation"])
def test_an_activation_that_keras_2_did_not_have_is_the_users_own(name, tmp_path):
    """BERT's gelu was a tanh formula that users registered; Keras 3's gelu is another."""
    x, kernel, bias = numbers(6, 4), numbers(4, 3), numbers(3)
    layers = [("Dense", {"units": 3, "name": "d", "activation": name})]
    weights = [("d/kernel:0", kernel), ("d/bias:0", bias)]
    with pytest.raises(lockstep.errors.NeedsCode, match=name):
        rescued(tmp_path, layers, (None, 4), weights)
    doubled = keras.saving.register_keras_serializable("tests", name)(lambda_double)
    lockstep.rescue(tmp_path / "old.h5", tmp_path / "new.keras", custom_objects={name: doubled})
    model = keras.models.load_model(tmp_path / "new.keras")
    np.testing.assert_allclose(model(x), 2 * (x @ kernel + bias), atol=2e-6)


def test_gelu_is_asked_for_up_to_the_version_that_tensorflow_2_3_wrote(tmp_path):
    layers, weights = [old_files.dense(3, "gelu", name="d")], [("d/kernel:0", numbers(4, 3))]
    weights.append(("d/bias:0", numbers(3)))
    template = old_files.sequential(layers, (None, 4))
    for version, known in (("2.4.0", False), ("2.10.0", True)):
        old = old_files.parallel_full(tmp_path / "old.h5", template, weights, version=version)
        if known:
            lockstep.rescue(old, tmp_path / "new.keras")
        else:
            with pytest.raises(lockstep.errors.NeedsCode, match="gelu"):
                lockstep.rescue(old, tmp_path / "new.keras")


def test_bilinear_upsampling_is_not_passed_over_in_silence(tmp_path):
    layers = [
        ("Conv2D", {"filters": 1, "kernel_size": [1, 1], "name": "c"}),
        ("UpSampling2D", {"size": [2, 2], "interpolation": "bilinear", "name": "up"}),
    ]
    template = old_files.sequential(layers, (None, 3, 3, 1))
    old = old_files.parallel_full(
        tmp_path / "old.h5", template,
        [("c/kernel:0", numbers(1, 1, 1, 1)), ("c/bias:0", numbers(1))],
        shapes=((None, 3, 3, 1),),
    )  # fmt: skip
    report = lockstep.rescue(old, tmp_path / "new.keras")
    assert any("bilinear" in note for note in report.notes)


@pytest.mark.parametrize(
    ("attributes", "weights"),
    [
        ({"backend": b"theano", "keras_version": b"2.2.4"}, ("c/kernel:0", "c/bias:0")),
        ({"keras_version": b"1.2.2"}, ("convolution2d_1_W", "convolution2d_1_b")),
        ({}, ("convolution2d_1_W", "convolution2d_1_b")),
    ],
)
def test_kernels_in_another_order_are_refused_and_the_arrays_are_not(attributes, weights, tmp_path):
    """Theano convolved where TensorFlow correlates, and Keras 1 does not tell which it did."""
    with h5py.File(tmp_path / "old.h5", "w") as root:
        root.attrs.update(attributes)
        old_files.names(root, "layer_names", ["c"])
        arrays = zip(weights, (numbers(3, 3, 3, 3), numbers(3)), strict=True)
        old_files.group(root, "c", [*arrays])
    model = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(3, 3)])
    with pytest.raises(lockstep.errors.UntranslatableModel, match="Keras 1 or with the") as caught:
        lockstep.load_weights(model, tmp_path / "old.h5")
    assert len(str(caught.value).splitlines()) == 3
    lockstep.rescue(tmp_path / "old.h5", tmp_path / "arrays.safetensors")


@keras.saving.register_keras_serializable("Custom")
class OldScale(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=(shape[-1],))

    def call(self, x):
        return x * self.scale


@keras.saving.register_keras_serializable("tests")
def times(x, by):
    return x * by


def test_the_users_code_is_found_where_old_files_name_it(tmp_path):
    """As `package>name`, inside of a wrapper, and with arrays as arguments."""
    x, kernel, scale = numbers(2, 5, 4), numbers(4, 3), numbers(3)
    function = {"function": ["AAAA", None, None], "function_type": "lambda"}
    by = {"by": {"type": "ndarray", "value": [1.0, 2.0, 3.0]}}
    wrapped = {"class_name": "Lambda", "config": {"name": "times", "arguments": by, **function}}
    layers = [
        old_files.dense(3, "Custom>negative", name="d", use_bias=False),
        ("Custom>OldScale", {"name": "s"}),
        ("TimeDistributed", {"name": "td", "layer": wrapped}),
    ]
    weights = [("d/kernel:0", kernel), ("s/scale:0", scale)]
    negative = keras.saving.register_keras_serializable("tests", "negative")(lambda_negative)
    own = {"times": times, "negative": negative}
    with pytest.raises(lockstep.errors.NeedsCode, match="'OldScale': OldScale"):
        rescued(tmp_path, layers, (None, 5, 4), weights, custom_objects=own)
    own["OldScale"] = OldScale
    model = rescued(tmp_path, layers, (None, 5, 4), weights, custom_objects=own)
    np.testing.assert_allclose(model(x), -(x @ kernel) * scale * [1, 2, 3], atol=1e-5)


def lambda_negative(x):
    return -x
