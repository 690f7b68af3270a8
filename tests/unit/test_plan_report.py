"""What `lockstep plan` says, and the one thing to do where it cannot plan."""

import io
import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import layers
from rich.console import Console

import lockstep
from lockstep.core.step_bytes import LayoutBytes, amount
from lockstep.engines.jax.introspection import ahead_of_time
from lockstep.errors import DeviceError, TargetNotFound, UnsupportedBackend, UnusableData
from lockstep.tools.plan.gpus import gpu_named
from lockstep.tools.plan.liveness import MEDIAN_ERROR, WORST_ERROR
from lockstep.tools.plan.memory_plan import parse_memory
from lockstep.tools.plan.temporaries import Request, estimated_temporaries, largest_batch
from tests.processes.common import warm_end


def compiled(*made, loss="mse"):
    model = keras.Sequential([*made, layers.Dense(512)], name="wide")
    model.compile("adam", loss)
    return model


def wide():
    return compiled(keras.Input((512,)))


def no_shape():
    return compiled()


def no_size():
    return compiled(keras.Input((None, 8), name="tokens"))


def not_compiled():
    return keras.Sequential([keras.Input((2,)), layers.Dense(1)], name="wide")


def trains():
    model = wide()
    model.fit(np.ones((4, 512)), np.ones((4, 512)))
    return model


def distributes():
    return lockstep.distribute(wide(), 2)


def returns_history():
    return {"loss": [0.1]}


class Uncallable(keras.Model):
    def call(self, x):
        raise RuntimeError("needs real numbers")


def not_traceable():
    model = Uncallable(name="wide")
    model.compile("sgd", "mse")
    return model, (np.ones((4, 2)), np.ones((4, 1)))


@pytest.mark.parametrize(
    ("build", "options", "error", "said"),
    [
        (
            wide,
            {"memory": "24 parsecs"},
            DeviceError,
            "memory='24 parsecs' was given, but an amount with a unit was expected.\n"
            "Pass the memory of one device, such as 24GB or 80GiB.",
        ),
        (
            wide,
            {"find_largest_batch": True},
            DeviceError,
            "The largest batch was requested, but no GPU to compile the step for.\n"
            'Name one, such as gpu="h100".',
        ),
        (
            wide,
            {"gpu": "h1000"},
            DeviceError,
            "gpu='h1000' was requested, but this GPU is not known.\n"
            "Known GPUs: a100, h100, h200, b200, l4, rtx4090, b300, rtx6000pro, l40s, a6000, "
            "a40, a10g, rtx3090, t4, v100, p100. For a different GPU",
        ),
        (
            wide,
            {"gpu": "TPU v3"},
            DeviceError,
            "gpu='TPU v3' was requested, but plan can compile a step only for GPUs.\n"
            'For a TPU, pass the memory of one core, such as memory="16GB".',
        ),
        (
            wide,
            {"gpu": "v100", "find_largest_batch": True},
            DeviceError,
            "The largest batch was requested, but XLA cannot compile a step for gpu='v100'.\n"
            "Remove largest_batch: the peak is then estimated for one batch size.",
        ),
        (
            wide,
            {"devices": (1, 0)},
            DeviceError,
            "devices=(1, 0) was given, but numbers of devices of at least 1 were expected.\n"
            "Pass a number, or several, such as (1, 2, 4).",
        ),
        (
            wide,
            {"micro_batch_size": 0},
            DeviceError,
            "micro_batch_size=0 was given, but a whole number of at least 1 was expected.\n"
            "Pass the most rows that a device may run at once, such as 32, or remove the "
            "argument.",
        ),
        (
            wide,
            {"batch_size": 0},
            UnusableData,
            "batch_size=0 was given, but a whole number of at least 1 was expected.\n"
            "Remove batch_size to use the batch size of the data.",
        ),
        (
            wide,
            {"data": 2},
            UnusableData,
            "data=2 was given, but arrays or a data set were expected.\n"
            "For numbers of devices, write devices=2.",
        ),
        (
            no_shape,
            {},
            UnusableData,
            "no_shape returned 'wide' without data, but the model has no input shape.\n"
            "Return (model, data), or begin the model with keras.Input(shape).",
        ),
        (
            no_size,
            {},
            UnusableData,
            "'tokens' has the shape (None, None, 8), but plan needs every size.\n"
            "Return (model, data) with a batch of the usual size.",
        ),
        (
            not_compiled,
            {},
            UnusableData,
            "A compiled model was expected, but 'wide' is not compiled.\n"
            "Call model.compile(optimizer, loss) first: the optimizer needs memory too.",
        ),
        (
            trains,
            {},
            TargetNotFound,
            "trains trains or runs 'wide', but in a plan the model has no weights.\n"
            "Return only the compiled model from it, and call fit elsewhere.",
        ),
        (
            distributes,
            {},
            UnusableData,
            "distributes distributes 'wide', but plan needs the model on one device.\n"
            "Return the model without calling lockstep.distribute.",
        ),
        (
            returns_history,
            {},
            TargetNotFound,
            "returns_history returned a dict, but a compiled model was expected.\n"
            "Return the model, or (model, data).",
        ),
        (
            not_traceable,
            {},
            UnusableData,
            "'wide' is not built, and Keras cannot build it from the shapes of a batch.\n"
            "Build it in not_traceable: add an Input, or call model.build(shape).",
        ),
        (
            "nowhere.py:build",
            {},
            TargetNotFound,
            "'nowhere.py' was requested, but there is no file nowhere.py.",
        ),
    ],
)
def test_what_cannot_be_planned_has_a_remedy(build, options, error, said):
    with pytest.raises(error) as caught:
        lockstep.plan(build, **options)
    assert str(caught.value).startswith(said)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_model_that_is_there_has_the_plan_of_its_function_and_keeps_its_values():
    """`plan(model, data, devices=2)`, as `verify` and `bench` take it, ended in a TypeError."""
    x, y = np.zeros((7, 512), "float32"), np.zeros((7, 512), "float32")
    model = wide()
    before = model.get_weights()
    found = lockstep.plan(model, (x, y), devices=(1, 2), batch_size=8, memory="1GB")
    expected = lockstep.plan(lambda: (wide(), (x, y)), devices=(1, 2), batch_size=8, memory="1GB")
    assert (found.layouts, found.notes) == (expected.layouts, expected.notes)
    assert found.layouts == lockstep.plan(wide, (x, y), (1, 2), batch_size=8, memory="1GB").layouts
    assert all(map(np.array_equal, model.get_weights(), before))
    assert np.isfinite(model.fit(x, y, verbose=0).history["loss"]).all()
    alone = lockstep.plan(wide(), devices=2)
    assert "wide was given no data: the batch is counted from the inputs," in str(alone.notes)


def test_what_cannot_be_planned_of_a_model_that_is_there():
    model = wide()
    with pytest.raises(UnusableData) as said:
        lockstep.plan(model, mixed_precision=True)
    assert str(said.value) == (
        "mixed_precision=True was given, but 'wide' is already built with the policy "
        "'float32'.\n"
        "Pass a function that builds the model: plan calls it under both policies."
    )
    with pytest.raises(UnusableData, match="'wide' is distributed, but plan needs the model on"):
        lockstep.plan(lockstep.distribute(model, 1))


def test_the_verdict_of_a_plan_names_the_layouts_that_fit():
    found = lockstep.plan(wide, devices=(1, 2), batch_size=4, memory="1GB")
    assert found.verdict == "1.00 GB hold 1 replicated, 2 replicated, 2 sharded."
    assert found.as_dict()["verdict"] == found.verdict
    assert lockstep.plan(wide, devices=2).verdict == ""
    least = min(found.layouts, key=lambda each: each.peak)
    small = lockstep.plan(wide, devices=(1, 2), batch_size=4, memory="1kB")
    said = f"No layout fits 1.00 kB: the smallest needs {amount(least.peak)} ({least.name})."
    assert small.verdict == said
    assert said in shown(small)


def test_a_model_without_data_has_the_batch_of_its_inputs():
    found = lockstep.plan(wide, devices=1, batch_size=8)
    assert found.layouts[0].batch == 8 * 512 * 4
    assert (
        "wide returns no data: the batch is counted from the inputs, without targets."
        in found.notes
    )


def test_a_batch_of_one_row_has_a_peak():
    """JAX traces other operations for one row than for two, and the traces were compared."""
    one, two = (lockstep.plan(wide, devices=2, batch_size=rows).layouts[0] for rows in (1, 2))
    assert one.temporaries == two.temporaries  # each device has one row
    assert one.temporaries > 0


def test_an_input_may_have_a_fixed_number_of_rows():
    found = lockstep.plan(
        lambda: compiled(keras.Input(batch_shape=(6, 512))), devices=4, batch_size=8
    )
    assert found.batch_size == 6
    assert found.layouts[0].batch == 2 * 512 * 4


def test_targets_may_be_class_numbers_where_there_are_no_data():
    for loss in ("sparse_categorical_crossentropy", "categorical_crossentropy"):
        found = lockstep.plan(lambda loss=loss: compiled(keras.Input((512,)), loss=loss), devices=1)
        assert found.layouts[0].metrics == 8


def test_the_report_says_what_the_memory_means(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_GATHER_AGAIN", "0")
    found = lockstep.plan(wide, devices=(1, 4), batch_size=4, memory="3.5MB")
    whole, replicated, sharded = found.layouts
    assert whole.weights == replicated.weights == 4 * 513 * 512
    assert sharded.weights == 4 * (512 * 512 // 4 + 512)
    assert found.verdict_of(whole) == f"about {amount(whole.peak - 3_500_000)} over"
    assert found.verdict_of(sharded) == f"about {amount(3_500_000 - sharded.peak)} left"
    unknown = replace(found, layouts=(replace(whole, temporaries=None),))
    assert unknown.verdict_of(unknown.layouts[0]) == "no room for all gradients"
    assert str(unknown) == (
        "1 device, replicated: 4.21 MB each without activations, no room for all gradients"
    )
    compiled = replace(found, gpu="NVIDIA H100", memory=round(whole.peak / 0.9))
    words = [compiled.verdict_of(each) for each in compiled.layouts]
    assert words[0] == f"may not fit: {amount(compiled.memory - whole.peak)} left"
    assert words[2] == f"fits: {amount(compiled.memory - sharded.peak)} left"
    compiled = replace(compiled, memory=whole.peak - 1000)
    assert compiled.verdict_of(whole) == "does not fit: 1.00 kB over"
    smaller = lockstep.plan(wide, devices=1, memory="3MB")
    assert smaller.verdict_of(smaller.layouts[0]) == "state alone does not fit"
    assert lockstep.plan(wide, devices=1).verdict_of(whole) == ""
    assert str(found).splitlines()[0] == (
        "1 device, replicated: 4.21 MB each without activations, "
        f"about {amount(whole.peak)} at the peak, {found.verdict_of(whole)}"
    )
    kernel = 512 * 512 * 4
    assert (sharded.gathered, sharded.all_gather) == (kernel, kernel * 3 // 4)
    assert sharded.sent == replicated.sent == 2 * 3 * whole.weights // 4


def deep():
    hidden = [layers.Dense(512, use_bias=False) for _ in range(11)]
    return compiled(keras.Input((512,)), *hidden)


def test_weights_that_training_gathers_again_are_not_counted_as_kept(monkeypatch):
    """By the sum of what is kept, no layout fitted a memory in which the model trained."""
    kept = lockstep.plan(deep, devices=4, batch_size=4, memory="1GB").layouts[1]
    small = kept.peak - 1_000_000  # a quarter of it has no room for 12 MB of weights
    found = lockstep.plan(deep, devices=4, batch_size=4, memory=small)
    again = found.layouts[1]
    assert (kept.gathers_again, again.gathers_again) == (False, True)
    assert again.temporaries < kept.temporaries / 2
    assert again.all_gather == 2 * kept.all_gather
    assert found.verdict_of(again) == f"about {amount(small - again.peak)} left"
    console = Console(width=200, file=io.StringIO())
    found.show(console)
    assert (
        "The weights of 4 sharded are gathered again for the backward pass."
        in console.file.getvalue()
    )
    assert "together" not in console.file.getvalue()  # one figure to compare with the memory
    monkeypatch.setenv("LOCKSTEP_GATHER_AGAIN", "0")
    said_to_keep = lockstep.plan(deep, devices=4, batch_size=4, memory=small).layouts[1]
    assert replace(said_to_keep, largest_micro_batch=None) == kept


def fixed_rows():
    states = layers.LSTM(8, stateful=True)
    return compiled(keras.Input(batch_shape=(6, 5, 3)), states)


class NeedsValues(keras.Model):
    def train_step(self, *args):
        raise RuntimeError("needs real numbers\nand more")


def needs_values():
    given = keras.Input((4,))
    model = NeedsValues(given, layers.Dense(1)(given))
    model.compile("sgd", "mse")
    return model


def crops():
    cropped = layers.RandomCrop(2, 2, name="cut"), layers.GlobalAveragePooling2D()
    return compiled(keras.Input((4, 4, 3)), *cropped)


def test_layers_that_keep_a_step_from_being_compiled_are_named():
    notes = lockstep.plan(crops, devices=1).notes
    assert (
        "On JAX the step is not compiled because of cut (RandomCrop): it may need more memory."
    ) in notes


def runs_eagerly():
    model = wide()
    model.compile("adam", "mse", run_eagerly=True)
    return model


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (fixed_rows, ""),
        (runs_eagerly, "UnusableData: 'wide' runs eager"),
        (needs_values, "RuntimeError: needs real"),
    ],
)
def test_a_step_that_is_not_traced_leaves_the_exact_part(build, why):
    found = lockstep.plan(build, devices=(1, 2), memory="1GB")
    assert [each.peak for each in found.layouts] == [None] * 3
    assert found.verdict_of(found.layouts[0]).endswith(" left for activations")
    assert found.notes[1].startswith("Not included: activations and temporaries")
    assert found.notes[2].startswith(f"The step could not be traced without data. {why}")
    assert "more" not in found.notes[2].split("real")[-1]


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return {}


def test_a_step_for_another_backend_is_not_tried_on_jax():
    """Its arguments are others: the reason was a TypeError, and its sentence came twice."""
    engine = SimpleNamespace(name="torch")
    batch = (np.zeros((4, 4), "float32"),)
    made = OwnStep([layers.Dense(1)], name="mine")
    made.compile("sgd", "mse")
    layouts, asked = [(layout_of(1), None)], Request([1])
    found, notes = estimated_temporaries(engine, made, batch, layouts, "train.py:build", asked)
    assert [each.temporaries for each in found] == [None]
    assert notes[1] == (
        "The step could not be traced without data. UnusableData: 'mine' has a train_step for "
        "torch, but activations can be traced only on JAX."
    )


def test_the_error_of_the_estimate_is_that_of_the_page():
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    table = page.split("<!-- errors -->")[1].split("<!-- end -->")[0]
    errors = [int(each) for each in re.findall(r"([+-]\d+)%", table)]
    assert len(errors) > 30
    assert statistics.median(map(abs, errors)) == pytest.approx(100 * MEDIAN_ERROR, abs=1)
    assert (min(errors), max(errors)) == tuple(round(100 * each) for each in WORST_ERROR)


def test_a_gpu_is_described_as_xla_reads_it():
    described = gpu_named("RTX4090")
    assert described["device_description_str"] == "NVIDIA GeForce RTX 4090"
    assert described["gpu_device_info"]["cuda_compute_capability"] == {"major": 8, "minor": 9}
    assert described["gpu_device_info"]["device_memory_size"] < 24 * 2**30


def test_a_gpu_without_bfloat16_is_planned_in_float16(monkeypatch):
    monkeypatch.setattr(ahead_of_time, "compiled_bytes", lambda *given: (0, 10**6))
    found = lockstep.plan(wide, devices=1, gpu="t4", mixed_precision=True)
    assert [each.policy for each in found.layouts] == ["", "mixed_float16"]
    assert found.notes[-1] == "Tesla T4 has no bfloat16: use float16."
    assert not any("bfloat16" in note for note in lockstep.plan(wide, devices=1, gpu="l4").notes)


def test_a_gpu_that_is_too_old_to_compile_for_is_estimated():
    found, plain = lockstep.plan(wide, devices=1, gpu="p100"), lockstep.plan(wide, devices=1)
    assert found.layouts == plain.layouts
    assert (found.gpu, found.memory) == (None, 17_066_885_120)
    assert found.notes[-2:] == (
        "Tesla P100-SXM2-16GB has no bfloat16: use float16.",
        "XLA cannot compile a step for it yet: the peak is an estimate.",
    )


@pytest.fixture
def compiles(monkeypatch):
    """Compiles a step of 1,000 bytes, and 10 more for each row of a device."""

    def up_to(most):
        tried = []

        def compiled_bytes(model, batch, layout, gpu, micro_batch_size):
            rows = batch[0].shape[0]
            tried.append(rows)
            if rows > most:
                raise RuntimeError("XLA refuses\nthis")
            return 1_000, 10 * rows // layout.devices

        monkeypatch.setattr(ahead_of_time, "compiled_bytes", compiled_bytes)
        return tried

    return up_to


JAX = SimpleNamespace(name="jax")


def layout_of(devices):
    return LayoutBytes(devices, "replicated", *[0] * 9)


def request_for(memory, say):
    return Request([1], memory=memory, gpu={"name": "h100"}, say=say)


@pytest.mark.parametrize(("rows", "memory"), [(32, 20_000), (4_000, 20_000), (1, 2_000_000)])
@pytest.mark.parametrize("devices", [1, 3])
def test_the_largest_batch_is_found_to_a_sixteenth(rows, memory, devices, compiles):
    tried, layout = compiles(10**9), layout_of(devices)
    batch = (keras.KerasTensor((rows, 4)), keras.KerasTensor((rows,)))
    told = []
    found = largest_batch(JAX, None, batch, layout, request_for(memory, told.append))
    most = (0.85 * memory - 1_000) / 10 * devices
    assert most * 15 / 16 - devices <= found <= most
    assert found % devices == 0
    assert len(tried) == len(set(tried)) < 16
    assert f"{found:,}".replace(",", "") + " rows ..." in " ".join(told)


def test_no_batch_may_fit_and_a_refused_one_ends_the_search(compiles):
    layout, batch = layout_of(1), (keras.KerasTensor((8, 4)),)
    compiles(10**9)
    assert largest_batch(JAX, None, batch, layout, request_for(900, print)) == 0
    told = []
    compiles(100)
    assert largest_batch(JAX, None, batch, layout, request_for(10**6, told.append)) == 32
    assert told[-1] == "RuntimeError: XLA refuses"


def test_a_compiler_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(ahead_of_time, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedBackend) as caught:
        lockstep.plan(wide, devices=1, gpu="h100")
    assert str(caught.value).splitlines()[1].startswith("Install it: pip install")


def test_the_slots_of_other_optimizers_are_named():
    def build():
        model = wide()
        model.critic = keras.optimizers.Adam()
        return model

    notes = lockstep.plan(build, devices=1).notes
    assert "The slots of critic are not counted, because they are created in a step." in notes


def test_amounts():
    assert list(map(amount, (0, 999, 1_000, 311_352, 24e9, 3.9e15))) == [
        *("0 B", "999 B", "1.00 kB", "311 kB", "24.0 GB", "3,900 TB")
    ]
    assert parse_memory("24GB") == parse_memory(" 24 gb ") == parse_memory(24 * 10**9) == 24e9
    assert parse_memory("1.5 GiB") == 1.5 * 2**30
    for wrong in ("24", "GB", "0GB", "-1GB", True, -1):
        with pytest.raises(DeviceError):
            parse_memory(wrong)


SCRIPT = """
import keras

def build():
    print("made")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model
"""


def test_the_command_prints_a_table_or_json(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["-m", "lockstep", "plan", "train.py:build", "--devices", "1,2", "--memory", "1GB"]
    status, printed, _ = warm_end(words, tmp_path)
    assert status == 0
    assert "│ 2 sharded    │ 12 B" in printed
    status, printed, error = warm_end([*words, "--json"], tmp_path)
    assert (status, error.strip()) == (0, "made")
    found = json.loads(printed)
    assert [each["devices"] for each in found["layouts"]] == [1, 2, 2]
    one = found["layouts"][0]
    assert one["peak"] == one["held"] - one["gradients"] + one["temporaries"]
    assert one["verdict"] == "about 1,000 MB left"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (
            ["--devices", "two"],
            2,
            "--devices=two is not a list of numbers. Write numbers of devices, such",
        ),
        (["--largest-batch"], 2, "--gpu was not given. Add it, for example --gpu h100."),
        (
            ["--memory", "big"],
            1,
            "DeviceError: memory='big' was given, but an amount with a unit",
        ),
    ],
)
def test_the_command_refuses_what_it_cannot_read(words, status, said, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done, _, error = warm_end(["-m", "lockstep", "plan", "train.py:build", *words], tmp_path)
    assert done == status
    assert said in error


def test_mixed_precision_adds_rows_that_send_and_compute_half():
    before = keras.config.dtype_policy().name
    found = lockstep.plan(
        lambda: compiled(keras.Input((512,)), layers.Dense(2048, "relu")),
        devices=(1, 4),
        batch_size=4096,
        mixed_precision=True,
    )
    assert keras.config.dtype_policy().name == before
    rows = {each.name: each for each in found.layouts}
    assert list(rows) == [
        "1 replicated",
        "1 replicated, mixed_bfloat16",
        *("4 replicated", "4 sharded"),
        *("4 replicated, mixed_bfloat16", "4 sharded, mixed_bfloat16"),
    ]
    for name in ("1 replicated", "4 replicated", "4 sharded"):
        one, mixed = rows[name], rows[f"{name}, mixed_bfloat16"]
        assert (mixed.weights, mixed.optimizer) == (one.weights, one.optimizer)
        assert mixed.temporaries < one.temporaries
        assert abs(2 * mixed.sent - one.sent) <= one.sent * 0.01
    assert "4 devices, sharded, mixed_bfloat16: " in str(found)

    console = Console(width=200, file=io.StringIO())
    found.show(console)
    assert console.file.getvalue().count("Sharded weights are gathered: ") == 1
    kernels = 4 * 2048 * (512 + 512)
    said = [f"{amount(size)} of temporaries" for size in (kernels, kernels // 2)]
    assert f"gathered: {', '.join(said)} under mixed_bfloat16." in console.file.getvalue()


def test_a_notebook_shows_a_bar_for_each_layout_and_the_memory():
    found = lockstep.plan(wide, devices=(1, 2), memory="8MB")
    html = found._repr_html_()
    assert html.count("display:flex;position") == len(found.layouts) == 3
    for each in found.layouts:
        assert each.name in html
        assert f'title="slots: {amount(each.optimizer)}"' in html
    assert html.count('title="memory: 8.00 MB"') == 3
    widths = [float(each) for each in re.findall(r"width:([\d.]+)%", html)]
    longest = max(8_000_000, *(each.peak for each in found.layouts))
    assert sum(widths[:4]) == pytest.approx(100 * found.layouts[0].peak / longest, abs=0.05)
    without = lockstep.plan(wide, devices=2)
    no_peak = replace(without, layouts=(replace(without.layouts[0], temporaries=None),))
    assert 'title="gradients: ' in no_peak._repr_html_()
    assert "memory: " not in no_peak._repr_html_()


def shown(found):
    console = Console(width=200, file=io.StringIO(), record=True)
    found.show(console)
    return console.export_text()


def eight_layers():
    hidden = [layers.Dense(64, "relu") for _ in range(8)]
    return compiled(keras.Input((64,)), *hidden)


def test_the_micro_batch_that_fits_is_found_and_a_plan_with_it_agrees():
    """The sizes of a device's rows: 2 devices need half as many parts."""
    peaks = {
        size: [
            each.peak
            for each in lockstep.plan(
                eight_layers, devices=(1, 2), batch_size=4096, micro_batch_size=size
            ).layouts
        ]
        for size in (None, 2048, 1024, 512)
    }
    assert peaks[2048][1:] == peaks[None][1:]  # two devices have no more rows
    memory = peaks[1024][0]
    found = lockstep.plan(eight_layers, devices=(1, 2), batch_size=4096, memory=memory)
    one, two, _ = found.layouts
    assert (one.largest_micro_batch, one.micro_batch_peak) == (1024, memory)
    assert two.largest_micro_batch == 1024
    assert two.micro_batch_peak == peaks[1024][1]
    fits = lockstep.plan(
        eight_layers, devices=1, batch_size=4096, memory=memory, micro_batch_size=1024
    )
    assert fits.verdict_of(fits.layouts[0]) == "about 0 B left"
    assert fits.layouts[0].largest_micro_batch is None
    said = shown(found).splitlines()
    assert said[-1] == (
        f"1 replicated fits with micro_batch_size=1024 ({amount(one.peak)} → {amount(memory)}, "
        "one more forward pass)."
    )
    assert "1,024 rows" in said[4]
    assert "in micro-batches of 1024 per device" in shown(fits).splitlines()[0]
    smaller = lockstep.plan(
        eight_layers, devices=1, batch_size=4096, memory=peaks[512][0], micro_batch_size=1024
    )
    assert smaller.layouts[0].largest_micro_batch == 512


def test_a_micro_batch_for_a_gpu_is_compiled(monkeypatch):
    """XLA has the last word: the estimate is too small by half here."""
    tried = []

    def compiled_bytes(model, batch, layout, gpu, micro_batch_size):
        tried.append(micro_batch_size)
        return 0, 1.5 * estimates[micro_batch_size]

    estimates = {
        size: lockstep.plan(eight_layers, devices=1, batch_size=4096, micro_batch_size=size)
        .layouts[0]
        .peak
        for size in (None, 2048, 1024, 512)
    }
    monkeypatch.setattr(ahead_of_time, "compiled_bytes", compiled_bytes)
    memory = round(1.01 * estimates[1024] / 0.85)
    found = lockstep.plan(
        eight_layers, devices=1, batch_size=4096, gpu="h100", memory=memory
    ).layouts[0]
    assert tried == [None, 1024, 512]
    assert found.largest_micro_batch == 512
    assert found.micro_batch_peak == 1.5 * estimates[512]


def test_a_model_that_cannot_have_parts_says_why():
    def build():
        return compiled(keras.Input((512,)), layers.BatchNormalization(name="norm"))

    peak = lockstep.plan(build, devices=1, batch_size=4096).layouts[0].peak
    found = lockstep.plan(build, devices=1, batch_size=4096, memory=peak - 1)
    assert found.layouts[0].largest_micro_batch is None
    assert found.notes[-1].startswith(
        "No smaller micro-batch can be planned: 'norm' (BatchNormalization) needs all rows of "
        "the batch at once"
    )
    found = lockstep.plan(build, devices=1, batch_size=4096, micro_batch_size=64)
    assert found.layouts[0].peak is None
    assert "'norm' (BatchNormalization) needs all rows" in found.notes[2]


def test_what_to_try_is_said_if_no_layout_fits():
    def told(memory):
        return shown(lockstep.plan(wide, devices=(1, 2), memory=memory))

    least = min(each.peak for each in lockstep.plan(wide, devices=(1, 2)).layouts)
    said = told(least - 1)
    assert (
        f"No layout fits {amount(least - 1)}: the smallest needs {amount(least)} (2 sharded" in said
    )
    assert "Try more devices, a smaller batch, or mixed precision." in said
    assert "No layout fits" not in told(least)
