"""The part of its state that a device holds with `state="sharded"`, and the host's peak of a save.

python benchmarks/sharded_state.py            # needs keras-hub
LOCKSTEP_REHEARSE=4 python benchmarks/sharded_state.py --save

The first table follows from the shapes of the variables. Adam's slots have the shapes of theirs, so
their part is the same. Virtual devices are host memory: the second figure is what a save adds.
"""

import argparse
import threading
import time

import keras

import lockstep
from lockstep.devices import sharded_dim

DEVICES = (2, 3, 4, 8)


def models():
    """Models of KerasHub in the sizes of their small presets, by name, each made when needed."""
    from keras_hub import models as hub

    size = {"num_layers": 12, "num_heads": 12, "hidden_dim": 768}
    yield "BERT base", lambda: hub.BertBackbone(30522, **size, intermediate_dim=3072)
    yield "GPT-2 base", lambda: hub.GPT2Backbone(50257, **size, intermediate_dim=3072)
    yield (
        "ViT base",
        lambda: hub.ViTBackbone(image_shape=(224, 224, 3), patch_size=16, mlp_dim=3072, **size),
    )
    yield (
        "Llama 3, 4 layers of the 1B",
        lambda: hub.Llama3Backbone(
            vocabulary_size=128256 // 8,  # as the layers, for the memory of a laptop
            num_layers=4,
            num_query_heads=32,
            num_key_value_heads=8,
            hidden_dim=2048,
            intermediate_dim=8192,
        ),
    )


def part_of_a_device(variables, devices):
    """The part of the bytes that one device holds; 1 / devices is the least."""
    sizes = [(v.shape, v.value.nbytes, v.value.dtype.itemsize) for v in variables]
    held = [
        size / devices if sharded_dim(shape, item, devices) is not None else size
        for shape, size, item in sizes
    ]
    return sum(held) / sum(size for _, size, _ in sizes)


def table():
    print("| model | parameters |", *(f"{n} devices |" for n in DEVICES))
    print("|---|---:|" + "---:|" * len(DEVICES))
    for name, make in models():
        variables = make().variables
        parts = [f"{part_of_a_device(variables, n):.4f}" for n in DEVICES]
        count = sum(v.value.size for v in variables) / 1e6
        print(f"| {name} | {count:.0f} M | {' | '.join(parts)} |", flush=True)


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def peak_of_a_save(layers, file="/tmp/sharded_state.weights.h5"):
    with lockstep.sharded():
        made = [keras.layers.Dense(2048, activation="relu") for _ in range(layers)]
        model = keras.Sequential([keras.Input((2048,)), *made])
    lockstep.distribute(model, state="sharded")
    model.save_weights(file)  # what the first one allocates for good
    before, most, ended = resident(), [0.0], threading.Event()

    def watch():
        while not ended.is_set():
            most[0] = max(most[0], resident())
            time.sleep(0.002)

    watching = threading.Thread(target=watch)
    watching.start()
    model.save_weights(file)
    ended.set()
    watching.join()
    whole = sum(v.value.nbytes for v in model.variables) / 2**20
    print(f"{whole:.0f} MiB in variables of 16 MiB: a save adds {most[0] - before:.0f} MiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    if parser.parse_args().save:
        for layers in (4, 16, 32):
            peak_of_a_save(layers)
    else:
        table()
