"""Which of XLA's options lockstep sets, and when it leaves them alone."""

import jax
import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.engines.jax import flags as jax_flags
from lockstep.engines.jax.flags import BUCKET, LEAST, OWN, SCHEDULER, SWITCH, choice

MIB = 2**20
ON = {SWITCH: "on"}


def test_small_models_get_buckets_an_eighth_of_their_gradients():
    assert choice("gpu", 16 * MIB, ON) == {SCHEDULER: True, BUCKET: 2 * MIB}


def test_buckets_are_not_tiny_and_large_models_keep_those_of_xla():
    assert choice("gpu", 3 * MIB, ON)[BUCKET] == LEAST
    assert choice("gpu", LEAST, ON) == {SCHEDULER: True}
    assert choice("gpu", 2 * OWN, ON)[BUCKET] == OWN // 4
    assert choice("gpu", 2 * OWN + 1, ON) == {SCHEDULER: True}


def test_nothing_is_set_where_nothing_is_summed_over_gpus():
    assert choice("cpu", 16 * MIB, ON) == {}
    assert choice("tpu", 16 * MIB, ON) == {}
    assert choice("gpu", 0, ON) == {}


@pytest.mark.parametrize("environ", [{}, {SWITCH: "off"}, {SWITCH: "1"}])
def test_unless_asked_for_everything_is_left_to_xla(environ):
    assert choice("gpu", 16 * MIB, environ) == {}


@pytest.mark.parametrize("name", [BUCKET, SCHEDULER])
def test_a_flag_that_the_user_has_set_wins(name):
    flags = f"--xla_dump_to=here --{name}=1"
    left = choice("gpu", 16 * MIB, {**ON, "XLA_FLAGS": flags})
    assert {name, *left} == {BUCKET, SCHEDULER}
    assert name not in left


def test_an_option_that_this_xla_does_not_know_is_left_out(monkeypatch):
    wanted = {BUCKET: 5, "xla_gpu_of_another_version": True}
    monkeypatch.setattr(jax_flags, "choice", lambda *_: wanted)
    assert jax_flags.options(jax.devices(), 16 * MIB) == {BUCKET: 5}


def test_one_device_needs_no_options(monkeypatch):
    monkeypatch.setattr(jax_flags, "choice", lambda *_: {BUCKET: 5})
    assert jax_flags.options(jax.devices()[:1], 16 * MIB) is None


@pytest.mark.parametrize("times", [1, 2])
def test_the_training_step_is_compiled_with_them_and_no_other_step_is(monkeypatch, times):
    asked = []

    def options(devices, gradient_bytes):
        asked.append((len(devices), gradient_bytes))
        return {BUCKET: 5}

    monkeypatch.setattr(jax_flags, "options", options)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    model.compile("sgd", "mse", steps_per_execution=times)
    lockstep.distribute(model, devices=2)
    x, y = np.ones((8, 4), "float32"), np.ones((8, 3), "float32")
    model.fit(x, y, batch_size=2, verbose=0)
    model.evaluate(x, y, batch_size=2, verbose=0)
    model.predict(x, batch_size=2, verbose=0)
    assert asked == [(2, 4 * (4 * 3 + 3)), (2, 0), (2, 0)]
