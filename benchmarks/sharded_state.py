"""What a device holds with `state="sharded"`, and what a save, a step and fine-tuning take.

python benchmarks/sharded_state.py            # needs keras-hub
LOCKSTEP_REHEARSE=4 python benchmarks/sharded_state.py --save
KERAS_BACKEND=torch LOCKSTEP_REHEARSE=2 python benchmarks/sharded_state.py --step
LOCKSTEP_REHEARSE=4 LOCKSTEP_GATHER_AGAIN=1 \\
    XLA_FLAGS=--xla_cpu_enable_concurrency_optimized_scheduler=false \\
    python benchmarks/sharded_state.py --fine-tune

The first table follows from the shapes of the variables. Adam's slots have the shapes of theirs, so
their part is the same. Virtual devices are host memory: the second figure is what a save adds.

The third is of PyTorch. It counts, in the first process, the bytes of the variables, and the most
bytes that forward and backward pass hold besides them: gradients, activations, gathered weights. On
a CPU it sees each tensor that an operation makes, and on a GPU PyTorch's allocator counts. The time
is that of whole steps without counting; replicated and sharded take turns.

The fourth builds 1.1 B parameters in bfloat16 in shards, and takes one step of LoRA. The host's
memory holds all virtual devices. XLA's default order of operations on CPUs favours concurrency, and
gathers many weights at once; the flag asks for the order that needs less memory.
"""

import argparse
import contextlib
import resource
import statistics
import threading
import time
import weakref

import keras
import numpy as np

import lockstep
from lockstep.core.devices import sharded_dim

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


def blocks(width=384, layers=8):
    """The blocks of a transformer."""
    inputs = x = keras.Input((32, width))
    for _ in range(layers):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(8, width // 8)(y, y)
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(width)(keras.layers.Dense(4 * width, "gelu")(y))
    return keras.Model(inputs, x)


def peak_of_passes(model, batch):
    """The most bytes that a step holds before its update, besides what it begins with."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from lockstep.core.state import variables_of
    from lockstep.engines.torch.steps import steps
    from lockstep.keras_compat import stored_value

    on_gpu = stored_value(model.variables[0]).is_cuda
    known = {stored_value(v).untyped_storage()._cdata for v in variables_of(model)}
    now, most, found = 0, 0, []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **kwargs or {})
            for each in keras.tree.flatten(made):
                if isinstance(each, torch.Tensor):
                    count(each.untyped_storage())
            return made

    def count(storage):
        nonlocal now, most
        key, size = storage._cdata, storage.nbytes()
        if key not in known and size:
            known.add(key)
            now += size
            most = max(most, now)
            weakref.finalize(storage, gone, key, size)

    def gone(key, size):
        nonlocal now
        known.discard(key)
        now -= size

    def update(*args, _update=steps.update):
        found.append(torch.cuda.max_memory_allocated() - before if on_gpu else most)
        _update(*args)

    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    plain, steps.update = steps.update, update
    try:
        with contextlib.nullcontext() if on_gpu else Counting():
            model.train_on_batch(*batch)
    finally:
        steps.update = plain
    return found[0]


def steps_on_pytorch(devices, rows, rounds=15):
    from lockstep.core.state import variables_of
    from lockstep.keras_compat import stored_value

    batch = np.random.default_rng(0).normal(size=(2, rows, 32, 384)).astype("float32")
    teams = {}
    for state in ("replicated", "sharded"):
        model = blocks()
        model.compile("adam", "mse")
        teams[state] = lockstep.distribute(model, devices, state=state)
        for _ in range(2):
            model.train_on_batch(*batch)
    seconds = {state: [] for state in teams}
    for number in range(rounds):
        for state in list(teams) if number % 2 else reversed(teams):
            start = time.perf_counter()
            teams[state].train_on_batch(*batch)
            seconds[state].append(time.perf_counter() - start)
    for state, model in teams.items():
        held = sum(stored_value(v).nbytes for v in variables_of(model)) / 2**20
        peak = peak_of_passes(model, batch) / 2**20
        step = statistics.median(seconds[state]) * 1e3
        print(
            f"{state}: state {held:.0f} MiB, passes {peak:.0f} MiB, step {step:.0f} ms", flush=True
        )
    each = [a / b for a, b in zip(seconds["sharded"], seconds["replicated"], strict=True)]
    low, median, high = statistics.quantiles(each, n=4)
    print(f"time of sharded over replicated: {median:.2f} [{low:.2f}, {high:.2f}]")


def fine_tune():
    from keras_hub import models as hub

    keras.config.set_dtype_policy("bfloat16")
    devices = len(lockstep.devices())
    with lockstep.sharded(devices=devices):
        backbone = hub.LlamaBackbone(
            vocabulary_size=32000,
            num_layers=22,
            num_query_heads=32,
            num_key_value_heads=4,
            hidden_dim=2048,
            intermediate_dim=5632,
        )
        backbone.enable_lora(8)
        model = hub.LlamaCausalLM(backbone=backbone, preprocessor=None)
    print(f"{model.count_params() / 1e9:.2f} B parameters; peak {most_resident():.1f} GB")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    lockstep.distribute(model, devices=devices, state="sharded")
    tokens = np.ones((devices, 16), "int32")
    model.fit({"token_ids": tokens, "padding_mask": tokens}, tokens, batch_size=devices, verbose=2)
    print(f"after one step: peak {most_resident():.1f} GB")


def most_resident():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--step", action="store_true")
    parser.add_argument("--fine-tune", action="store_true")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8)
    options = parser.parse_args()
    if options.fine_tune:
        fine_tune()
    elif options.step:
        steps_on_pytorch(options.devices, options.rows)
    elif options.save:
        for layers in (4, 16, 32):
            peak_of_a_save(layers)
    else:
        table()
