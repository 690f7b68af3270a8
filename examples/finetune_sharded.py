"""A language model of KerasHub, fine-tuned with LoRA on a backbone in shards.

LOCKSTEP_REHEARSE=4 KERAS_BACKEND=jax python examples/finetune_sharded.py

No device has the whole backbone: it goes from its file to its shards, frozen, in int8 or bfloat16.
The model is small, with random weights. `--preset` takes the name or the folder of a trained one.
"""

import argparse
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

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--gpus", type=int, default=4)
parser.add_argument("--preset", help="a model of KerasHub; left out, one is made and saved")
parser.add_argument("--frozen", choices=["int8", "bfloat16"], default="int8")
parser.add_argument("--rank", type=int, default=4)
parser.add_argument("--samples", type=int, default=200)
parser.add_argument("--length", type=int, default=32, help="tokens in a text")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch", type=int, default=10, help="rows over all devices together")
parser.add_argument("--folder", type=Path, default=Path("gemma"))
options = parser.parse_args()

DTYPE = "bfloat16" if options.frozen == "bfloat16" else "float32"


def saved_preset():
    """Save a small Gemma with random weights as a preset, which stands for a trained one."""
    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=512,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=1,
        hidden_dim=256,
        intermediate_dim=512,
        head_dim=64,
        dtype=DTYPE,
    )
    keras_hub.models.GemmaCausalLM(backbone, preprocessor=None).save_to_preset(options.folder)
    return str(options.folder)


def tokens(rng):
    """Sequences in which each token is the one before it plus a step; the model learns the next."""
    start, step = rng.integers(1, 400, (options.samples, 1)), rng.integers(1, 4, (1, 1))
    every = ((start + step * np.arange(options.length + 1)) % 511 + 1).astype("int32")
    x = {"token_ids": every[:, :-1], "padding_mask": np.ones_like(every[:, :-1])}
    return x, every[:, 1:]


def pretrained(preset):
    model = keras_hub.models.GemmaCausalLM.from_preset(preset, preprocessor=None, dtype=DTYPE)
    if options.frozen == "int8":
        with warnings.catch_warnings(action="ignore"):  # Keras names the layers without weights
            model.quantize("int8")
    return model


keras.utils.set_random_seed(1)
preset = options.preset or saved_preset()
with lockstep.sharded(devices=options.gpus):
    model = pretrained(preset)
    model.backbone.enable_lora(options.rank)

lockstep.distribute(model, devices=options.gpus, state="sharded")
model.compile(
    keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
)
x, y = tokens(np.random.default_rng(0))
model.fit(x, y, batch_size=options.batch, epochs=options.epochs, shuffle=False)

# The file has what was trained. `model.save` would round it into the frozen weights.
file = options.folder / "trained.lora.h5"
model.backbone.save_lora_weights(str(file))

one = pretrained(preset)
one.backbone.load_lora_weights(str(file))
few = {name: rows[:8] for name, rows in x.items()}
many = np.asarray(model.predict(few, verbose=0), "float32")
difference = np.max(np.abs(np.asarray(one.predict(few, verbose=0), "float32") - many))
print(f"{file.name} by plain Keras on one device: largest difference {difference:.1e}")
