"""A language model of KerasHub, fine-tuned with LoRA on several devices, and used on one.

lockstep plan examples/finetune_lora.py:build --devices 1,2 --gpu t4
LOCKSTEP_REHEARSE=2 KERAS_BACKEND=jax python examples/finetune_lora.py --gpus 2

The frozen backbone goes from its file to its shards, in int8 or bfloat16, and no device has all of
it. The model is small, with random weights. `PRESET=gemma_2b_en` takes a trained one, by its name
or its folder. The adapters are a file of their own, and the merged model is a plain one.
"""

import argparse
import os
import sys
import warnings
from pathlib import Path

import keras
import numpy as np

import lockstep

try:
    import keras_hub
except ImportError:
    sys.exit(
        "This example fine-tunes a model of KerasHub, which is not installed here.\n"
        "Its layers are what a user would fine-tune, so there is no other model in its place.\n"
        "Run pip install keras-hub."
    )

PRESET = os.environ.get("PRESET", "")
LENGTH = 32
"""The tokens of a text."""


def small_model(dtype="float32"):
    """Return a small Gemma with random weights, which stands for a trained one."""
    keras.utils.set_random_seed(1)
    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=512,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=1,
        hidden_dim=256,
        intermediate_dim=512,
        head_dim=64,
        dtype=dtype,
    )
    return keras_hub.models.GemmaCausalLM(backbone, preprocessor=None)


def dtype_of(frozen):
    """Return the type in which the layers compute."""
    return "bfloat16" if frozen == "bfloat16" else "float32"


def pretrained(preset, frozen):
    """Return the model of a preset, with frozen weights of this type."""
    make = keras_hub.models.GemmaCausalLM.from_preset
    model = make(preset, preprocessor=None, dtype=dtype_of(frozen))
    return quantized(model) if frozen == "int8" else model


def quantized(model):
    """Return the model with weights in int8."""
    with warnings.catch_warnings(action="ignore"):  # Keras names the layers without weights
        model.quantize("int8")
    return model


def compiled(model):
    """Return the model, compiled."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, sampler="greedy")
    return model


def build():
    """Return what `lockstep plan` needs: a compiled model with adapters, and a few rows."""
    model = pretrained(PRESET, "int8") if PRESET else quantized(small_model())
    model.backbone.enable_lora(4)
    return compiled(model), tokens(8)


def tokens(samples):
    """Sequences in which each token is the one before it plus a step; the model learns the next."""
    rng = np.random.default_rng(0)
    start, step = rng.integers(1, 400, (samples, 1)), rng.integers(1, 4, (1, 1))
    every = ((start + step * np.arange(LENGTH + 1)) % 511 + 1).astype("int32")
    x = {"token_ids": every[:, :-1], "padding_mask": np.ones_like(every[:, :-1])}
    return x, every[:, 1:]


def main():
    """Train on several devices, and compare with one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--frozen", choices=["int8", "bfloat16", "float32"], default="int8")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=10, help="rows over all devices together")
    parser.add_argument("--folder", type=Path, default=Path("gemma"))
    options = parser.parse_args()
    preset = PRESET
    if not preset:
        preset = str(options.folder)
        small_model(dtype_of(options.frozen)).save_to_preset(preset)

    with lockstep.sharded(devices=options.gpus):
        model = pretrained(preset, options.frozen)
        model.backbone.enable_lora(options.rank)
    lockstep.distribute(model, devices=options.gpus, state="sharded")
    x, y = tokens(options.samples)
    compiled(model).fit(x, y, batch_size=options.batch, epochs=options.epochs, shuffle=False)

    # The file has what was trained: a few megabytes, whatever the model.
    adapters = options.folder / "trained.lora.h5"
    adapters.parent.mkdir(exist_ok=True)
    model.backbone.save_lora_weights(str(adapters))

    # From here on plain Keras, on one device.
    one = pretrained(preset, options.frozen)
    one.backbone.load_lora_weights(str(adapters))
    few = {name: rows[:8] for name, rows in x.items()}
    many = np.asarray(model.predict(few, verbose=0), "float32")
    difference = np.max(np.abs(np.asarray(one.predict(few, verbose=0), "float32") - many))
    print(f"{adapters.name} by plain Keras on one device: largest difference {difference:.1e}")

    prompts = dict(few, padding_mask=np.arange(LENGTH) < np.full((8, 1), LENGTH // 2))
    texts = [
        np.asarray(each.generate(prompts, stop_token_ids=None)["token_ids"])
        for each in (model, compiled(one))
    ]
    print(f"generate: {int(np.sum(texts[0] == texts[1]))} of {texts[0].size} tokens are equal")

    # `save` adds the adapters to the frozen weights, which rounds them to their type.
    merged = options.folder / "merged.keras"
    one.save(merged)
    loaded = keras.saving.load_model(merged, compile=False)  # its `compile` is KerasHub's own
    difference = np.max(np.abs(np.asarray(loaded.predict(few, verbose=0), "float32") - many))
    print(f"{merged.name} by plain Keras on one device: largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
