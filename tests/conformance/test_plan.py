"""A plan gives the bytes that the devices of JAX then hold, counted from the arrays themselves."""

import gc
import json
import os
import subprocess
import sys

import jax
import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.core.state import metric_variables
from lockstep.engines.jax.steps.programs import Programs
from lockstep.keras_compat import variables as of_variables
from tests.conformance.zoo import OPTIMIZERS, ZOO
from tests.tiers import rest

STATES = ["replicated", "sharded"]
LAYOUTS = [(1, "replicated"), *((n, state) for n in (2, 3, 4, 8) for state in STATES)]
RNG = np.random.default_rng(3)


def bytes_by_device(arrays):
    """The bytes of the fullest device."""
    held = dict.fromkeys(jax.devices(), 0)
    for array in arrays:
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return max(held.values())


def held(variables):
    distinct = {id(variable): variable.value for variable in variables}
    return bytes_by_device(distinct.values())


def allocated(build, devices, state, rows, monkeypatch):
    """What a device holds after a step of training, of the batch too."""
    model, (x, y) = build()
    lockstep.distribute(model, devices, state=state)
    batches = []
    shard = Programs._shard

    def noted(steps, batch):
        placed = shard(steps, batch)
        batches.append([jax.device_put(leaf) for leaf in jax.tree.leaves(placed)])
        return placed

    with monkeypatch.context() as patch:
        patch.setattr(Programs, "_shard", noted)
        model.fit(x, y, batch_size=rows, epochs=1, shuffle=False, verbose=0)
    metrics = metric_variables(model)
    counted = {id(variable) for variable in metrics}
    weights = [*model.trainable_variables, *model.non_trainable_variables]
    return {
        "weights": held(v for v in weights if id(v) not in counted),
        "optimizer": held(model.optimizer.variables),
        "gradients": held(model.trainable_variables),
        "metrics": held(metrics),
        "batch": bytes_by_device(batches[0]),
    }


def planned(build, devices, state, rows):
    found = lockstep.plan(build, devices=devices, batch_size=rows).layouts
    (one,) = [each for each in found if each.state == state]
    names = ("weights", "optimizer", "gradients", "metrics", "batch")
    return {name: getattr(one, name) for name in names}


def zoo(name, optimizer):
    def build():
        keras.utils.clear_session(free_memory=False)
        case = ZOO[name]
        model = case.build(case.dropout)
        model.compile(OPTIMIZERS[optimizer](), case.loss, metrics=case.metrics)
        return model, case.data(21, np.random.default_rng(1))

    return build


@pytest.mark.thorough
@pytest.mark.each_value_once
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize(("devices", "state"), LAYOUTS)
def test_planned_bytes_are_those_that_are_allocated(name, devices, state, monkeypatch):
    """Small variables count as large ones, so that these models have shards."""
    monkeypatch.setattr(sys.modules["lockstep.core.devices"], "SHARDED_FROM", 64)
    monkeypatch.setattr(of_variables, "_LARGE", 8)
    build = zoo(name, "adamw" if devices % 2 else "sgd")
    found = planned(build, devices, state, 21)
    assert found == allocated(build, devices, state, 21, monkeypatch)


def wide(optimizer, policy=None, frozen=False, lora=False):
    def build():
        keras.utils.clear_session(free_memory=False)
        made = [keras.Input((40,)), *(layers.Dense(256, dtype=policy) for _ in range(3))]
        model = keras.Sequential([*made, layers.BatchNormalization(), layers.Dense(5)])
        model.layers[1].trainable = not frozen
        if lora:
            model.layers[2].enable_lora(4)
        metrics = [keras.metrics.AUC(num_thresholds=50)]
        model.compile(optimizer(), "mse", metrics=metrics)
        x, y = RNG.normal(size=(14, 40)), RNG.uniform(size=(14, 5))
        return model, (x.astype("float32"), y.astype("float32"))

    return build


KINDS = {
    "mixed": wide(lambda: keras.optimizers.Adam(1e-3), "mixed_bfloat16"),
    "frozen": wide(lambda: keras.optimizers.Adam(1e-3, clipnorm=1.0), frozen=True),
    "lora": wide(lambda: keras.optimizers.AdamW(1e-3), lora=True),
    "average": wide(lambda: keras.optimizers.Adam(1e-3, use_ema=True)),
    "accumulated": wide(lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)),
    "factored": wide(lambda: keras.optimizers.Adafactor(1e-3)),
}


@pytest.mark.thorough
@pytest.mark.each_value_once
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("devices", [2, 4, 3])
@pytest.mark.parametrize("state", STATES[::-1])
def test_kinds_of_state(kind, devices, state, monkeypatch):
    found = planned(KINDS[kind], devices, state, 7)
    assert found == allocated(KINDS[kind], devices, state, 7, monkeypatch)


def test_a_batch_is_counted_in_the_type_in_which_jax_stores_it():
    def build():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model, (np.zeros((50, 3), "float64"), np.zeros((50, 1), "int64"))

    rows = {
        size: lockstep.plan(build, devices=4, batch_size=size).layouts[0].batch
        for size in (None, 50, 1)
    }
    assert rows == {None: 8 * 16, 50: 13 * 16, 1: 16}  # 32 rows of arrays, as in Keras


def test_a_model_that_is_larger_than_the_memory_here_takes_none():
    def build():
        model = keras.Sequential([keras.Input((64,))])
        made.append(model)
        for _ in range(12):
            model.add(layers.Dense(300_000))
        model.compile("adam", "mse")
        return model

    made = []
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    found = lockstep.plan(build, devices=(1, 8), memory="80GB")
    assert found.layouts[0].weights > 11 * 300_000**2 * 4  # 3.9 TB
    new = [array for array in jax.live_arrays() if id(array) not in before]
    assert sum(array.nbytes for array in new) < 1e6
    assert [found.verdict_of(each) for each in found.layouts] == ["state alone does not fit"] * 3


def test_after_a_plan_variables_have_values_again():
    lockstep.plan(KINDS["frozen"], devices=2)
    model = keras.Sequential([keras.Input((64,)), layers.Dense(64)])
    model.compile("sgd", "mse")
    assert np.any(model.get_weights()[0])
    model.fit(np.ones((4, 64)), np.ones((4, 64)), verbose=0)


MOVED = """
import json, sys
import lockstep
from pathlib import Path
from tests.conformance.test_communication import collectives, training_program
from tests.conformance.test_plan import to_send

sys.stdout, out = sys.stderr, sys.stdout
state, policy, folder = sys.argv[1:]
(found,) = [each for each in lockstep.plan(lambda: to_send(policy), devices=8).layouts
            if (each.devices, each.state) == (8, state)]
training_program(to_send(policy), devices=8, rows=32, state=state)
(file,) = Path(folder).glob("*jit_program*after_spmd-partitioning*")
sizes, _ = collectives(file.read_text())
print(json.dumps([sizes, found.all_reduce, found.reduce_scatter, found.all_gather]), file=out)
"""


def to_send(policy):
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(512, "relu", dtype=policy),
            layers.Dense(512, dtype=policy),
            layers.Dense(10),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", *rest("float32")])
def test_what_is_sent_is_what_the_partitioned_step_moves(state, policy, tmp_path):
    """The sizes of collectives before XLA fits them to CPUs, apart from the loss and metrics."""
    dump = f"--xla_dump_to={tmp_path} --xla_dump_hlo_pass_re=spmd.*"
    environment = {"LOCKSTEP_REHEARSE": "8", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    printed = subprocess.run(
        [sys.executable, "-c", MOVED, state, policy, str(tmp_path)],
        env={**os.environ, **environment, "XLA_FLAGS": dump},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    sizes, all_reduce, reduce_scatter, all_gather = json.loads(printed)
    # Of B bytes, a device of 8 sends 7/8 B in a ring, twice in an all-reduce. The partitioner
    # writes a reduce-scatter as an all-reduce, of which each device takes its part.
    reduced = all_reduce * 8 // 7 // 2 + reduce_scatter * 8 // 7
    assert abs(sizes["all-reduce"] - reduced) <= 64
    assert sizes.get("all-gather", 0) == all_gather * 8 // 7
