"""A preset of KerasHub that goes to shards while it loads is that of one device, on JAX."""

import gc
import re
from collections import Counter

import h5py
import jax
import keras
import keras_hub
import numpy as np
import pytest

import lockstep
from tests.examples.common import FOLDER
from tests.processes.common import script
from tests.third_party.keras_hub_models import byte_pairs, lines_of_text
from tests.third_party.row import BOUNDS, DEVICES

SHARD_FILE = 5e-4
"""The size of one file of a preset, in GB: there are several."""


def llama():
    vocabulary, merges = byte_pairs(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    )
    tokenizer = keras_hub.models.Llama3Tokenizer(vocabulary=vocabulary, merges=merges)
    return keras_hub.models.Llama3CausalLM(
        keras_hub.models.Llama3Backbone(
            vocabulary_size=512,
            num_layers=1,
            num_query_heads=4,
            num_key_value_heads=2,
            hidden_dim=128,
            intermediate_dim=256,
        ),
        preprocessor=keras_hub.models.Llama3CausalLMPreprocessor(tokenizer, sequence_length=16),
    )


@pytest.fixture(scope="module")
def one():
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    return llama()


@pytest.fixture
def most_bytes(monkeypatch):
    """The most bytes that each device has held, beside those before the test."""
    gc.collect()
    before, most = _bytes_of_devices(), Counter()

    def seen(function):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            for device, held in _bytes_of_devices().items():
                most[device] = max(most[device], held - before[device])
            return result

        return call

    owner = next(base for base in keras.Variable.__mro__ if "_direct_assign" in vars(base))
    monkeypatch.setattr(owner, "_direct_assign", seen(owner._direct_assign))
    for name in ("device_put", "make_array_from_callback"):
        monkeypatch.setattr(jax, name, seen(getattr(jax, name)))
    return most


def _bytes_of_devices():
    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    shards = [shard for array in arrays for shard in array.addressable_shards]
    buffers = {(s.device, s.data.unsafe_buffer_pointer()): s.data.nbytes for s in shards}
    held = Counter()
    for (device, _), size in buffers.items():
        held[device] += size
    return held


def assert_no_more_than_a_share_and_one_variable(most, model):
    values = [variable.value for variable in model.variables]
    small = sum(value.nbytes for value in values if value.is_fully_replicated)
    share = (sum(value.nbytes for value in values) - small) // DEVICES
    assert small < share / 2
    assert set(most) == set(jax.devices()[:DEVICES])
    assert max(most.values()) <= share + small + max(value.nbytes for value in values)


def assert_equal(made, one):
    for mine, theirs in zip(made.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs, strict=True)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": SHARD_FILE}])
def test_no_device_holds_more_than_its_share_and_one_variable(one, tmp_path, most_bytes, options):
    one.save_to_preset(tmp_path, **options)
    assert len(list(tmp_path.glob("model*.h5"))) == (1 if not options else 3)
    most_bytes.clear()
    with lockstep.sharded(DEVICES):
        made = keras_hub.models.Llama3CausalLM.from_preset(str(tmp_path))
    assert_no_more_than_a_share_and_one_variable(most_bytes, made)
    assert_equal(made, one)


def test_a_file_in_parts_goes_to_the_shards_and_comes_from_them(one, tmp_path, most_bytes):
    one.save_weights(tmp_path / "one.weights.json", max_shard_size=SHARD_FILE)
    keras.utils.set_random_seed(9)
    most_bytes.clear()
    with lockstep.sharded(DEVICES):
        made = llama()
    made.load_weights(tmp_path / "one.weights.json")
    assert_no_more_than_a_share_and_one_variable(most_bytes, made)
    assert_equal(made, one)
    lockstep.distribute(made, DEVICES, state="sharded")
    made.save_weights(tmp_path / "many.weights.json", max_shard_size=SHARD_FILE)
    files = [sorted(file.name[4:] for file in tmp_path.glob(f"{n}*")) for n in ("one_", "many")]
    assert len(files[0]) == 3
    keras.utils.set_random_seed(9)
    plain = llama()
    plain.load_weights(tmp_path / "many.weights.json")
    assert_equal(plain, one)


@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
def test_a_preset_trains_and_writes_text_as_on_one_device(tmp_path, one):
    one.save_to_preset(tmp_path)
    with lockstep.sharded(DEVICES):
        many = keras_hub.models.Llama3CausalLM.from_preset(str(tmp_path))
    many = lockstep.distribute(many, DEVICES, state="sharded")
    left = []
    for model in (one, many):
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=["accuracy"],
            sampler="greedy",
        )
        keras.utils.set_random_seed(5)
        history = model.fit(lines_of_text(22), batch_size=6, epochs=2, verbose=0).history
        evaluated = model.evaluate(lines_of_text(22), batch_size=8, verbose=0)
        texts = model.generate(["def ", "return self", "if"], max_length=12)
        left.append((history, evaluated, texts, model.get_weights()))
    assert left[0][2] == left[1][2]
    for mine, theirs in zip(*map(keras.tree.flatten, left), strict=True):
        if not isinstance(mine, str):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=BOUNDS["float32"])


@pytest.mark.parametrize(
    ("frozen", "held"), [("int8", "0.4 of 1.0"), ("bfloat16", "0.7 of 1.8"), ("float32", "of 3.5")]
)
def test_the_example_trains_lora_on_a_backbone_in_shards(tmp_path, frozen, held):
    options = f"--samples 33 --epochs 2 --frozen {frozen} --folder {tmp_path} --gpus {DEVICES}"
    printed = script(FOLDER / "finetune_lora.py", *options.split(), LOCKSTEP_REHEARSE=str(DEVICES))
    assert held in printed
    found = dict(re.findall(r"(\S+) by plain Keras on one device: .* (\S+)", printed))
    assert float(found["trained.lora.h5"]) <= BOUNDS["float32"]
    if frozen == "float32":
        assert float(found["merged.keras"]) <= BOUNDS["float32"]
    assert "generate: 256 of 256 tokens are equal" in printed
    with h5py.File(tmp_path / "trained.lora.h5") as file:
        trained = [name for name in _datasets(file) if name.endswith("lora_kernel_b")]
        assert len(trained) == 4
        assert all(np.any(file[name][()]) for name in trained)


def test_the_example_is_planned_with_a_micro_batch(tmp_path):
    words = f"plan {FOLDER / 'finetune_lora.py'}:build --devices 1,2 --batch-size 64".split()
    printed = script("-m", "lockstep", *words, "--memory", "12MB", KERAS_BACKEND="jax")
    assert "fits with micro_batch_size=" in printed


def _datasets(file):
    names = []
    file.visititems(lambda name, found: names.append(name))
    return names
