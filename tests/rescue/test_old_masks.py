"""Masks give what old Keras gave, by its own rules written in NumPy, or the file is refused."""

import keras
import numpy as np
import pytest

import lockstep
from lockstep.errors import UntranslatableModel
from tests.rescue import old_files
from tests.rescue.old_files import lstm, numbers

WORDS = np.array([[1, 2, 3, 0, 0, 0], [4, 5, 0, 0, 0, 0]])
SETTINGS = {"units": 3, "activation": "tanh", "recurrent_activation": "sigmoid"}


EMBEDDINGS = numbers(7, 4)


def names(prefix, weights):
    kinds = ("kernel", "recurrent_kernel", "bias")
    return [(f"{prefix}/{kind}:0", w) for kind, w in zip(kinds, weights, strict=True)]


def weights_of_lstm(width):
    return [numbers(width, 12), numbers(3, 12), numbers(12)]


def call(class_name, name, *inputs, **config):
    nodes = [[[one, 0, 0, {}] for one in inputs]] if inputs else []
    config = {"name": name, **config}
    return {"class_name": class_name, "name": name, "config": config, "inbound_nodes": nodes}


def words(name="w"):
    return call("InputLayer", name, batch_input_shape=[None, 6], dtype="int32")


def embedding(name, source="w", **config):
    return call("Embedding", name, source, input_dim=7, output_dim=4, mask_zero=True, **config)


def functional(layers, output, name="model_1"):
    taken = [[one["name"], 0, 0] for one in layers if one["class_name"] == "InputLayer"]
    config = {"name": name, "layers": layers, "input_layers": taken}
    return {"class_name": "Model", "config": {**config, "output_layers": [output]}}


def rescued(tmp_path, layers, weights, version="2.2.4", output=None):
    """Rescue a file of a single model; `weights` by layer."""
    last = [layers[-1]["name"], 0, 0]
    groups = [(one["name"], weights.get(one["name"], [])) for one in layers]
    config = functional(layers, output or last)
    old = old_files.single_full(tmp_path / "old.h5", config, groups, version=version)
    report = lockstep.rescue(old, tmp_path / "new.keras")
    return report, keras.models.load_model(tmp_path / "new.keras")


def refused(tmp_path, layers, weights, said, **kwargs):
    with pytest.raises(UntranslatableModel, match=said) as caught:
        rescued(tmp_path, layers, weights, **kwargs)
    assert len(str(caught.value).splitlines()) <= 3
    assert not (tmp_path / "new.keras").exists()
    lockstep.rescue(tmp_path / "old.h5", tmp_path / "new.h5")  # Keras 2 reads it as it always did


E = {"e": [("e/embeddings:0", EMBEDDINGS)], "e2": [("e2/embeddings:0", EMBEDDINGS[::-1])]}


@pytest.mark.parametrize(
    ("layers", "width"),
    [
        ([call("InputLayer", "f", batch_input_shape=[None, 6, 2]),
          call("Concatenate", "join", "e", "f", axis=-1)], 6),
        ([call("InputLayer", "f", batch_input_shape=[None, 6, 4]),
          call("Add", "join", "e", "f")], 4),
        ([words("f"), embedding("e2", "f"), call("Average", "join", "e", "e2")], 4),
    ],
)  # fmt: skip
def test_a_merge_whose_mask_keras_3_makes_by_another_rule_is_refused(layers, width, tmp_path):
    every = [words(), embedding("e"), *layers, call("LSTM", "l", "join", **SETTINGS)]
    refused(tmp_path, every, {**E, "l": names("l", weights_of_lstm(width))}, "'join'")


@pytest.mark.filterwarnings("ignore:Layer 'tower'")  # says that it drops the mask; it does not
def test_a_merge_in_a_nested_model_sees_the_mask_from_outside(tmp_path):
    inner = functional(
        [call("InputLayer", "x", batch_input_shape=[None, 6, 4]),
         call("InputLayer", "y", batch_input_shape=[None, 6, 4]),
         call("Add", "join", "x", "y"), call("LSTM", "l", "join", **SETTINGS)],
        ["l", 0, 0], "tower",
    )  # fmt: skip
    plain = embedding("e2")
    plain["config"]["mask_zero"] = False
    nested = {**inner, "name": "tower", "inbound_nodes": [[["e", 0, 0, {}], ["e2", 0, 0, {}]]]}
    weights = {**E, "tower": names("l", weights_of_lstm(4))}
    refused(tmp_path, [words(), embedding("e"), plain, nested], weights, "'join'",
            output=["tower", 1, 0])  # fmt: skip


def test_merges_of_one_mask_compute_what_they_did(tmp_path):
    """A residual connection, and two embeddings of the same words."""
    kernel, weights = numbers(4, 4), weights_of_lstm(8)
    layers = [
        words(), embedding("e"), embedding("e2"),
        call("Dense", "d", "e", units=4, use_bias=False), call("Add", "sum", "e", "d"),
        call("Concatenate", "join", "sum", "e2", axis=-1), call("LSTM", "l", "join", **SETTINGS),
    ]  # fmt: skip
    given = {**E, "d": [("d/kernel:0", kernel)], "l": names("l", weights)}
    _, model = rescued(tmp_path, layers, given)
    x = EMBEDDINGS[WORDS]
    x = np.concatenate([x + x @ kernel, EMBEDDINGS[::-1][WORDS]], axis=-1)
    np.testing.assert_allclose(model(WORDS), lstm(x, *weights, mask=WORDS != 0)[:, -1], atol=1e-6)


def test_a_mask_made_inside_time_distributed_is_refused(tmp_path):
    wrapped = embedding("e")
    wrapped = {"class_name": "Embedding", "config": wrapped["config"]}
    layers = [
        call("InputLayer", "w", batch_input_shape=[None, 3, 6], dtype="int32"),
        call("TimeDistributed", "td", "w", layer=wrapped),
        call("TimeDistributed", "td_l", "td", layer={"class_name": "LSTM", "config": SETTINGS}),
    ]
    weights = {
        "td": [("td/embeddings:0", EMBEDDINGS)],
        "td_l": names("td_l", weights_of_lstm(4)),
    }
    refused(tmp_path, layers, weights, "'td'")


def test_a_long_sequence_is_looked_at_in_one_step(tmp_path):
    """Keras unrolls TimeDistributed, and a stranger's file may have any length."""
    inner = {"class_name": "Dense", "config": {"name": "d", "units": 2, "use_bias": False}}
    word = call("InputLayer", "w", batch_input_shape=[None, 10**7], dtype="int32")
    layers = [word, embedding("e"), call("TimeDistributed", "td", "e", layer=inner)]
    groups = [("w", []), ("e", E["e"]), ("td", [("td/kernel:0", numbers(4, 2))])]
    old = old_files.single_full(tmp_path / "old.h5", functional(layers, ["td", 0, 0]), groups)
    report = lockstep.rescue(old, tmp_path / "new.keras")
    assert not any("mask" in note for note in report.notes)


@pytest.mark.parametrize(("version", "noted"), [("2.2.4", True), ("2.4.0", False)])
def test_masked_steps_of_a_bidirectional_layer_are_told_of(version, noted, tmp_path):
    """Stand-alone Keras 2 repeated its last output there; tf.keras and Keras 3 give zeros."""
    forward, backward = weights_of_lstm(4), weights_of_lstm(4)
    inner = {"class_name": "LSTM", "config": {"name": "l", "return_sequences": True, **SETTINGS}}
    layers = [words(), embedding("e"),
              call("Bidirectional", "bi", "e", layer=inner, merge_mode="concat")]  # fmt: skip
    weights = [*names("bi/forward_l", forward), *names("bi/backward_l", backward)]
    report, model = rescued(tmp_path, layers, {**E, "bi": weights}, version)
    assert any("bi uses a mask" in note for note in report.notes) == noted
    x, mask = EMBEDDINGS[WORDS], WORDS != 0
    back = lstm(x[:, ::-1], *backward, mask=mask[:, ::-1])[:, ::-1]
    wanted = np.concatenate([lstm(x, *forward, mask=mask), back], axis=-1)
    np.testing.assert_allclose(np.asarray(model(WORDS))[mask], wanted[mask], atol=1e-6)


def softmax_layers(axis):
    return [
        words(), embedding("e"), call("LSTM", "l", "e", return_sequences=True, **SETTINGS),
        call("Dense", "d", "l", units=6, use_bias=False), call("Softmax", "s", "d", axis=axis),
    ]  # fmt: skip


def test_a_softmax_layer_of_keras_2_took_no_mask(tmp_path):
    weights, kernel = weights_of_lstm(4), numbers(3, 6)
    given = {**E, "l": names("l", weights), "d": [("d/kernel:0", kernel)]}
    _, model = rescued(tmp_path, softmax_layers(-1), given)
    raised = np.exp(lstm(EMBEDDINGS[WORDS], *weights, mask=WORDS != 0) @ kernel)
    wanted = raised / raised.sum(axis=-1, keepdims=True)
    # As many rows as steps: Keras 3's Softmax takes the mask of the rows for one of the classes.
    given = np.concatenate([WORDS] * 3)
    np.testing.assert_allclose(model(given), np.concatenate([wanted] * 3), atol=1e-6)
