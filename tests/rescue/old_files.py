"""Old files made by hand, for what the genuine ones do not hold."""

import json
from pathlib import Path

import h5py
import numpy as np

LEGACY = Path(__file__).parents[1] / "files" / "legacy"
RNG = np.random.default_rng(7)


def numbers(*shape):
    return RNG.normal(size=shape).astype("float32")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def old_hard_sigmoid(x):
    return np.clip(0.2 * x + 0.5, 0, 1)


def lstm(x, kernel, recurrent, bias, gate=sigmoid, mask=None):
    """The outputs of all steps; where the mask is off, the last output again."""
    h = c = np.zeros((len(x), len(recurrent)), "float32")
    steps = []
    for t in range(x.shape[1]):
        i, f, g, o = np.split(x[:, t] @ kernel + h @ recurrent + bias, 4, axis=1)
        new = gate(f) * c + gate(i) * np.tanh(g)
        on = True if mask is None else mask[:, t, None]
        h, c = np.where(on, gate(o) * np.tanh(new), h), np.where(on, new, c)
        steps.append(h)
    return np.stack(steps, axis=1)


def names(thing, key, listed):
    thing.attrs[key] = np.asarray([n.encode() for n in listed]) if listed else []


def group(root, name, weights):
    made = root.require_group(name)
    names(made, "weight_names", [weight for weight, _ in weights])
    for weight, value in weights:
        made[weight] = value


def parallel_weights(
    path, weights, *, inner="model_1", inputs=("input_1",), devices=2, merges=("dense_1",),
    version="2.2.4",
):  # fmt: skip
    """What `parallel_model.save_weights()` wrote: one group with everything."""
    with h5py.File(path, "w") as root:
        _layers(root, weights, inner, inputs, devices, merges)
        _stamp(root, version)
    return path


def parallel_full(
    path, template, weights, *, devices=2, version="2.2.4", training=None, optimizer=(),
    inputs=("input_1",), merges=("merged",), shapes=((None, 4),),
):  # fmt: skip
    """What `parallel_model.save()` wrote, around a template config."""
    inner = template["config"]["name"] if isinstance(template["config"], dict) else "sequential_1"
    with h5py.File(path, "w") as root:
        root.attrs["model_config"] = json.dumps(
            parallel_config(template, inner, inputs, shapes, devices, merges)
        ).encode()
        if training:
            root.attrs["training_config"] = json.dumps(training).encode()
        _stamp(root, version)
        below = root.create_group("model_weights")
        _layers(below, weights, inner, inputs, devices, merges)
        _stamp(below, version)
        if optimizer:
            group(root, "optimizer_weights", optimizer)
    return path


def parallel_config(template, inner, inputs, shapes, devices, merges):
    layers = [
        {
            "class_name": "InputLayer",
            "name": name,
            "config": {"name": name, "batch_input_shape": list(shape), "dtype": "float32"},
            "inbound_nodes": [],
        }
        for name, shape in zip(inputs, shapes, strict=True)
    ]
    calls = []
    for part in range(devices):
        call = []
        for position, name in enumerate(inputs):
            slice_ = f"lambda_{part * len(inputs) + position + 1}"
            layers.append(
                {
                    "class_name": "Lambda",
                    "name": slice_,
                    "config": {
                        "name": slice_,
                        "function": ["bm90IGNvZGU=", None, None],
                        "function_type": "lambda",
                        "arguments": {"i": part, "parts": devices},
                    },
                    "inbound_nodes": [[[name, 0, 0, {}]]],
                }
            )
            call.append([slice_, 0, 0, {}])
        calls.append(call)
    layers.append({**template, "name": inner, "inbound_nodes": calls})
    for position, name in enumerate(merges):
        layers.append(
            {
                "class_name": "Concatenate",
                "name": name,
                "config": {"name": name, "axis": 0},
                "inbound_nodes": [[[inner, part + 1, position, {}] for part in range(devices)]],
            }
        )
    return {
        "class_name": "Model",
        "config": {
            "name": "model_9",
            "layers": layers,
            "input_layers": [[name, 0, 0] for name in inputs],
            "output_layers": [[name, 0, 0] for name in merges],
        },
    }


def single_full(path, config, groups, *, version="2.2.4", training=None):
    """What `model.save()` of a single model wrote; groups are (layer, weights)."""
    with h5py.File(path, "w") as root:
        root.attrs["model_config"] = json.dumps(config).encode()
        if training:
            root.attrs["training_config"] = json.dumps(training).encode()
        _stamp(root, version)
        below = root.create_group("model_weights")
        names(below, "layer_names", [name for name, _ in groups])
        for name, weights in groups:
            group(below, name, weights)
    return path


def single_weights(path, groups, version="2.4.0"):
    """What `model.save_weights()` of a single model wrote."""
    with h5py.File(path, "w") as root:
        names(root, "layer_names", [name for name, _ in groups])
        root.attrs["keras_version"] = version.encode()
        for name, weights in groups:
            group(root, name, weights)
    return path


def sequential(layers, shape, name="sequential_1"):
    """A Sequential config of Keras 2.2.4; layers are (class, config)."""
    entries = []
    for position, (class_name, config) in enumerate(layers):
        config = {"name": f"{class_name.lower()}_{position + 1}", "trainable": True, **config}
        if position == 0:
            config["batch_input_shape"] = list(shape)
        entries.append({"class_name": class_name, "config": config})
    return {"class_name": "Sequential", "config": {"name": name, "layers": entries}}


def dense(units, activation="linear", **config):
    return ("Dense", {"units": units, "activation": activation, "use_bias": True, **config})


def _layers(root, weights, inner, inputs, devices, merges):
    slices = [f"lambda_{n + 1}" for n in range(devices * len(inputs))]
    names(root, "layer_names", [*inputs, *slices, inner, *merges])
    for name in [*inputs, *slices, *merges]:
        group(root, name, [])
    group(root, inner, weights)


def _stamp(root, version):
    root.attrs["backend"] = b"tensorflow"
    root.attrs["keras_version"] = version.encode()
