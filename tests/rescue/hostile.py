"""Hostile and odd files, by name: each function writes one file, and none is large."""

import io
import json
import shutil
import struct
import zipfile
import zlib

import h5py
import numpy as np

from tests.rescue import old_files
from tests.rescue.old_files import LEGACY

GOOD = LEGACY / "keras-2.2.4__mlp4-g2" / "parallel_full.h5"
ESCAPE = "\x1b]0;owned\x07\x1b[2J[bold]"


def good(path):
    """A genuine file that can be changed; its first layer."""
    shutil.copyfile(GOOD, path)
    root = h5py.File(path, "r+")
    return root, root["model_weights/sequential_1/dense_1"]


def hard_links_over_40_levels(path):
    with h5py.File(path, "w") as root:
        here = root.create_group("layers")
        for _ in range(40):
            below = here.create_group("a")
            here["b"], here = below, below
        here["vars/0"] = np.ones(2)


def archive(path, **parts):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, text in parts.items():
            zipped.writestr(name.replace("__", "."), text)


def config_that_unfolds_to_250_megabytes(path):
    archive(path, config__json=b"[" + b"{}," * 83_000_000 + b"{}]", metadata__json="{}")


def metadata_that_unfolds_to_30_megabytes_of_lists(path):
    archive(path, config__json="{}", metadata__json=b'{"a":[' + b"[]," * 10_000_000 + b"[]]}")


def config_that_declares_100_bytes_and_unfolds_to_a_gigabyte(path):
    archive(path, config__json=b" " * 2**30)
    path.write_bytes(path.read_bytes().replace(struct.pack("<I", 2**30), struct.pack("<I", 100)))


def committed_datatype(path):
    root, layer = good(path)
    del layer["kernel:0"]
    layer["kernel:0"] = np.dtype("f4")
    root.close()


def version(path, text):
    root, _ = good(path)
    root.attrs["keras_version"] = text
    root.close()


def version_of_a_superscript(path):
    version(path, "2.²")


def version_of_5000_digits(path):
    version(path, "2." + "9" * 5000)


def version_of_escapes(path):
    version(path, "2.2.4 " + ESCAPE.replace("\x1b]0;owned\x07", "\x1b[31m"))


def deflated(size):
    """Zeros as zlib packs them; one packed block is repeated."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(2**22)) + packer.flush(zlib.Z_FULL_FLUSH)
    checksum = 1 + (size % 65521 << 16)  # of zeros
    return b"\x78\xda" + block * (size // 2**22) + b"\x03\x00" + struct.pack(">I", checksum)


def packed_array(path, shape, chunk, raw, count=1):
    root, layer = good(path)
    del layer["kernel:0"]
    found = layer.create_dataset("kernel:0", shape, "f4", chunks=chunk, compression="gzip")
    for number in range(count):
        found.id.write_direct_chunk((number, *(0 for _ in shape[1:])), raw)
    root.close()


def chunks_that_unfold_to_4_gigabytes(path):
    packed_array(path, (990, 2**20), (1, 2**20), deflated(2**22), 990)


def one_chunk_that_unfolds_to_4_gigabytes(path):
    packed_array(path, (990 * 2**20,), (990 * 2**20,), deflated(990 * 2**22))


def a_chunk_that_unfolds_to_more_than_it_declares(path):
    packed_array(path, (2**20,), (2**20,), deflated(1500 * 2**22))


def names_that_repeat_one_large_text(path):
    """4,000 names that refer to one text of 60,000 characters."""
    root, _ = good(path)
    layer = root["model_weights/sequential_1"]
    del layer.attrs["weight_names"]
    names = ["x" * 60_000, *[f"y{n:05d}" for n in range(3_999)]]
    layer.attrs.create("weight_names", names, dtype=h5py.string_dtype())
    root.close()
    content = bytearray(path.read_bytes())
    start = content.find(struct.pack("<I", 60_000))
    large = bytes(content[start : start + 16])  # its length, and its place in the heap
    for number in range(3_999):
        content[start + 16 * (number + 1) : start + 16 * (number + 2)] = large
    path.write_bytes(content)


def nested(depth):
    """A model that calls a model twice that calls a model twice ..."""
    inner = {"class_name": "Model", "config": graph("m0", "i0", [
        {"class_name": "Dense", "name": "d", "inbound_nodes": [[["i0", 0, 0, {}]]],
         "config": {"name": "d", "units": 6, "activation": "linear", "use_bias": False}}],
        "d", 0)}  # fmt: skip
    for level in range(1, depth + 1):
        name, start = inner["config"]["name"], f"i{level}"
        calls = [[[start, 0, 0, {}]], [[name, 1, 0, {}]]]
        layer = {**inner, "name": name, "inbound_nodes": calls}
        inner = {"class_name": "Model", "config": graph(f"m{level}", start, [layer], name, 2)}
    return inner


def graph(name, start, layers, end, node):
    first = {"class_name": "InputLayer", "name": start, "inbound_nodes": [],
             "config": {"name": start, "batch_input_shape": [None, 6]}}  # fmt: skip
    return {"name": name, "layers": [first, *layers], "input_layers": [[start, 0, 0]],
            "output_layers": [[end, node, 0]]}  # fmt: skip


def models_that_call_each_other_twice_over_30_levels(path):
    kernel = ("d/kernel:0", np.eye(6, dtype="f4"))
    old_files.single_full(path, nested(30), [("m29", [kernel])])


def models_nested_50_deep(path):
    kernel = ("d/kernel:0", np.eye(6, dtype="f4"))
    config = nested(0)
    for level in range(50):
        entries = [{**config, "name": f"m{level}"}]
        config = {"class_name": "Sequential", "config": {"name": f"s{level}", "layers": entries}}
    old_files.single_full(path, config, [("m49", [kernel])])


def many_layers(path, count):
    layers = [("Activation", {"name": f"a{n}", "activation": "relu"}) for n in range(count)]
    config = old_files.sequential([old_files.dense(6, name="d"), *layers], (None, 6))
    weights = [("d/kernel:0", np.eye(6, dtype="f4")), ("d/bias:0", np.ones(6, "f4"))]
    with h5py.File(path, "w") as root:
        root.attrs.create("model_config", json.dumps(config), dtype=h5py.string_dtype())
        root.attrs["keras_version"] = b"2.2.4"
        below = root.create_group("model_weights")
        old_files.names(below, "layer_names", ["d"])
        old_files.group(below, "d", weights)


def a_model_of_25000_layers(path):
    many_layers(path, 25_000)


REFUSED = {
    ".h5": [
        committed_datatype,
        chunks_that_unfold_to_4_gigabytes,
        one_chunk_that_unfolds_to_4_gigabytes,
        a_chunk_that_unfolds_to_more_than_it_declares,
        names_that_repeat_one_large_text,
        models_that_call_each_other_twice_over_30_levels,
        models_nested_50_deep,
        a_model_of_25000_layers,
    ],
    ".weights.h5": [hard_links_over_40_levels],
    ".keras": [
        config_that_unfolds_to_250_megabytes,
        config_that_declares_100_bytes_and_unfolds_to_a_gigabyte,
        metadata_that_unfolds_to_30_megabytes_of_lists,
    ],
}
"""What every command refuses."""

READ = {
    ".h5": [version_of_a_superscript, version_of_5000_digits, version_of_escapes],
}
"""Odd, and readable."""


def npz(path, header):
    array = io.BytesIO()
    array.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
    with zipfile.ZipFile(path, "w") as zipped:
        for name in ("x0.npy", "y0.npy"):
            zipped.writestr(name, array.getvalue())


def outputs_of_8_terabytes(path):
    npz(path, b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,)}\n")


def outputs_of_no_shape(path):
    npz(path, b"{'descr': '<f8', 'fortran_order': False, 'shape': ((((((((((\n")


def outputs_of_no_type(path):
    npz(path, b"{'descr': [('x', 'zz')], 'fortran_order': False, 'shape': (1,)}\n")


def outputs_that_unfold_to_a_gigabyte(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name in ("x0.npy", "y0.npy"):
            with zipped.open(name, "w") as part:
                for _ in range(512):
                    part.write(bytes(2**20))


CHECKS = [
    outputs_of_8_terabytes,
    outputs_of_no_shape,
    outputs_of_no_type,
    outputs_that_unfold_to_a_gigabyte,
]
"""Files for `--check` that are refused."""
