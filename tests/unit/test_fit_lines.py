import re
import threading
import time
from dataclasses import replace

import keras
import numpy as np
import pytest

import lockstep
from lockstep.core import fit_lines
from lockstep.core.fit_arguments import arguments_of, wants_words
from lockstep.core.fit_lines import first_step_line, fit_line, replicated_words
from lockstep.core.layout import DataParallel
from lockstep.engines import current_engine
from lockstep.training import loop

GPUS = ("gpu:0", "gpu:1", "gpu:2", "gpu:3")


class Buckets:
    """Data with an attribute of its own."""

    batch_size = (64, 8)


def fit(x=None, y=None, batch_size=None, epochs=1, verbose="auto", steps_per_epoch=None):
    """Only its signature counts."""


@pytest.fixture(autouse=True)
def _no_rehearsal(monkeypatch):
    monkeypatch.delenv("LOCKSTEP_REHEARSE")


@pytest.mark.parametrize(
    ("args", "kwargs", "batch"),
    [
        ((np.zeros((9, 2)), None, 256), {}, "global batch 256 = 64 per replica"),
        ((np.zeros((9, 2)),), {"batch_size": 10}, "global batch 10 = up to 3 per replica"),
        ((np.zeros((9, 2)),), {}, "global batch 32 = 8 per replica"),
        (({"a": np.zeros(9)},), {}, "global batch 32 = 8 per replica"),
        ((iter([]),), {}, "batch size set by the data, each batch split across 4"),
        ((np.zeros((9, 2)), None, 0), {}, "global batch 32 = 8 per replica"),
        ((Buckets(),), {}, "batch size set by the data, each batch split across 4"),
        (
            (np.zeros((212, 2)),),
            {"steps_per_epoch": 4},
            "batch size set by the data, each batch split across 4",
        ),
    ],
)
def test_the_line_says_what_runs(args, kwargs, batch):
    line = fit_line("jax", DataParallel(GPUS), arguments_of(fit, args, kwargs))
    assert line == f"lockstep: jax, 4 devices (gpu:0 to gpu:3), {batch}"


def test_a_fit_that_takes_whatever_it_is_given():
    def fit(*args, **kwargs):
        """Only its signature counts."""

    given = {"x": np.zeros((9, 2)), "batch_size": 8, "verbose": 0}
    given = arguments_of(fit, (), given)
    assert fit_line("jax", DataParallel(GPUS), given).endswith("global batch 8 = 2 per replica")
    assert not wants_words(given)


class Own(keras.Model):
    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)

    def evaluate(self, x, y, *args):
        return super().evaluate(x, y, *args)

    def predict(self, data, *args):
        return super().predict(*data, *args)


def test_what_a_method_of_ones_own_takes_by_place_is_called_as_in_the_one_it_overrides():
    own = Own()
    given = {"x": "x", "y": "y", "batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": True}
    assert arguments_of(own.fit, ("x", "y", 8, 2, 0), {"shuffle": True}) == given
    assert arguments_of(own.evaluate, ("x", "y", 8, 0), {})["verbose"] == 0
    assert arguments_of(own.predict, (("x", 8), 0), {}) == {"data": ("x", 8)}


def test_a_data_loader_knows_its_batch():
    class Loader:
        batch_size = 8

    line = fit_line("jax", DataParallel(GPUS[:1]), arguments_of(fit, (Loader(),), {}))
    assert line == "lockstep: jax, 1 device (gpu:0), global batch 8 = 8 per replica"


@pytest.mark.parametrize(
    ("devices", "size", "given", "said"),
    [
        (4, 32, {"batch_size": 256}, "256 rows over 4 devices: 64 each, 2 micro-batches of 32"),
        (4, 2, {"batch_size": 10}, "10 rows over 4 devices: up to 3 each, 2 micro-batches of 2"),
        (1, 32, {"batch_size": 75}, "75 rows, 3 micro-batches of 25"),
        (1, 32, {"batch_size": 11}, "11 rows, 1 micro-batch of 11"),
        (1, 1, {}, "batch size set by the data, in micro-batches of at most 1 row"),
    ],
)
def test_the_line_has_the_micro_batches(devices, size, given, said):
    layout = DataParallel(GPUS[:devices], micro_batch_size=size)
    assert fit_line("jax", layout, given).endswith(f"), {said}")


def test_a_rehearsal_is_named(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_REHEARSE", "2")
    line = fit_line("jax", DataParallel(("cpu:0", "cpu:1")), {"batch_size": 2})
    assert line == (
        "lockstep: jax, 2 devices (cpu:0, cpu:1, rehearsed), global batch 2 = 1 per replica"
    )


@pytest.mark.parametrize(("verbose", "wanted"), [(0, False), (1, True), (2, True), ("auto", True)])
def test_silence_is_kept(verbose, wanted):
    assert wants_words(arguments_of(fit, (), {"verbose": verbose})) is wanted


def test_a_fit_that_hands_its_arguments_on():
    def own_fit(*args, **kwargs):
        return fit(*args, **kwargs)

    assert not wants_words(arguments_of(own_fit, (), {"verbose": 0}))
    line = fit_line("jax", DataParallel(GPUS), arguments_of(own_fit, (), {"batch_size": 256}))
    assert line.endswith("global batch 256 = 64 per replica")


def test_fit_says_one_line_at_its_start(capsys):
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    lockstep.distribute(made, 2)
    made.fit(np.zeros((8, 2)), np.zeros((8, 1)), batch_size=4, verbose=2)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("lockstep: jax, 2 devices (cpu:0, cpu:1")
    assert sum(line.startswith("lockstep: jax") for line in said) == 1
    made.fit(np.zeros((8, 2)), np.zeros((8, 1)), verbose=0)
    assert capsys.readouterr().out == ""


def test_the_line_has_the_state_of_a_device(capsys):
    """Adam makes two slots for each of 66,560 bytes in its first step."""
    made = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256)])
    made.compile("adam", "mse")
    lockstep.distribute(made, 2)
    for end in ("66.6 kB of state each, without optimizer slots", "200 kB of state each"):
        made.fit(np.zeros((8, 64)), np.zeros((8, 256)), batch_size=4, verbose=2)
        assert capsys.readouterr().out.splitlines()[0].endswith(f", {end}")
    line = replicated_words(1_200_000_000, True, 24_000_000_000)
    assert line == ", 1.20 GB of state each (memory 24.0 GB)"


def test_the_line_names_different_cards(capsys, monkeypatch):
    here = current_engine().devices()
    cards = [replace(each, kind=f"card {n % 2}") for n, each in enumerate(here)]
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    lockstep.distribute(made, 2)
    monkeypatch.setattr(type(current_engine()), "devices", lambda engine: cards)
    made.fit(np.zeros((8, 2)), np.zeros((8, 1)), batch_size=4, verbose=2)
    line = capsys.readouterr().out.splitlines()[0]
    assert line.endswith(", different devices (card 0, card 1): a step waits for the slowest")


def test_fit_says_what_is_compiled_and_how_long_it_took(capsys, monkeypatch):
    monkeypatch.setattr(loop, "LONG", 0.0)
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    lockstep.distribute(made, 2)
    told = []
    for number in range(5):
        if number in (0, 2, 4):
            made.compile("sgd", "mse", run_eagerly=number == 4)
        made.fit(np.zeros((8, 2)), np.zeros((8, 1)), batch_size=4, epochs=2, verbose=2)
        said = capsys.readouterr().out.splitlines()
        after = [line for line in said if "started after" in line]
        told.append((", compiling the training step, " in said[0], len(after)))
    assert told == [(True, 1), (False, 0), (True, 1), (False, 0), (False, 0)]


def test_the_wait_for_the_first_step_is_told_in_seconds():
    line = first_step_line("training", "reading its batch", 12.345)
    assert line == "lockstep: the first training step started after 12.3 s: reading its batch"


@pytest.mark.parametrize(
    ("name", "options", "compiles", "said"),
    [
        ("RandomZoom", {}, True, ""),
        ("RandomZoom", {"jit_compile": False}, False, ""),
        ("RandomZoom", {"run_eagerly": True}, False, ""),
        ("RandomCrop", {}, False, ", the step is not compiled because of changes (RandomCrop)"),
        ("RandomCrop", {"jit_compile": False}, False, ""),
    ],
)
def test_layers_with_which_keras_compiles_no_step(
    name, options, compiles, said, monkeypatch, capsys
):
    """A step with them took three times as long, and nothing said so."""
    calls, kind = [], getattr(keras.layers, name)
    transform = kind.transform_images

    def counted_transform(self, images, transformation, training=True):
        calls.append(self)
        return transform(self, images, transformation, training=training)

    monkeypatch.setattr(kind, "transform_images", counted_transform)
    changes = kind(*{"RandomZoom": (0.2,), "RandomCrop": (4, 4)}[name], name="changes")
    made = keras.Sequential([changes, keras.layers.GlobalAveragePooling2D()])
    lockstep.distribute(made, 2).compile("sgd", "mse", **options)
    x = np.ones((8, 6, 6, 2), "float32")
    made.fit(x, x[:, 0, 0], batch_size=4, verbose=0)
    calls.clear()
    made.fit(x, x[:, 0, 0], batch_size=4, verbose=2)
    assert bool(calls) is not compiles
    assert not made.jit_compile  # files and the fingerprint of runs are those of Keras
    line = capsys.readouterr().out.splitlines()[0]
    assert said in line
    assert ("not compiled" in line) is bool(said)


class Slow(keras.layers.Layer):
    """Is traced for longer than a wait is silent."""

    def call(self, x):
        time.sleep(0.4)
        return x


def test_waits_for_training_and_validation_say_what_they_wait_for(capsys, monkeypatch):
    """Nothing was printed before, and nothing for validation."""
    monkeypatch.setattr(loop, "LONG", 0.3)
    monkeypatch.setattr(fit_lines, "WAIT", 0.1)
    made = keras.Sequential([keras.Input((2,)), Slow(), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    lockstep.distribute(made, 2)
    x, y = np.zeros((8, 2)), np.zeros((8, 1))
    capsys.readouterr()
    made.fit(x, y, batch_size=4, epochs=2, verbose=2, validation_data=(x, y))
    work = "reading its batch and compiling the step"
    told = [line for line in capsys.readouterr().out.splitlines() if line.endswith(work)]
    assert [re.sub(r"[\d.]+ s", "N s", line) for line in told] == [
        f"lockstep: the first {phase} step {what}{work}"
        for phase in ("training", "validation")
        for what in ("takes more than N s: ", "started after N s: ")
    ]


class Fails(keras.layers.Layer):
    """Fails in a step, and not when the model is built."""

    in_a_step = False

    def call(self, x):
        if Fails.in_a_step:
            raise OSError("the disk is gone")
        return x


def test_after_a_step_that_fails_nothing_waits_for_it(monkeypatch):
    monkeypatch.setattr(Fails, "in_a_step", False)
    made = keras.Sequential([keras.Input((2,)), Fails(), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    lockstep.distribute(made, 2)
    begins = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: setattr(Fails, "in_a_step", True)
    )
    x, y = np.zeros((8, 2)), np.zeros((8, 1))
    with pytest.raises(OSError, match="the disk is gone"):
        made.fit(x, y, batch_size=4, verbose=2, callbacks=[begins])
    assert not [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
