"""What is compiled once is not compiled again at the next start."""

import json
from pathlib import Path

import pytest

from tests.processes.common import python

SCRIPT = """
import json, os, sys
import lockstep, keras, numpy as np, jax
made = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
{before}
lockstep.distribute(made, 2)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from jax import monitoring
hits = []
monitoring.register_event_listener(lambda event, **_: hits.append(event))
made.compile("sgd", "mse")
made.fit(np.ones((10, 8), "float32"), np.ones((10, 1), "float32"), batch_size=4, verbose=0)
print(json.dumps([jax.config.jax_compilation_cache_dir,
    sum(event.endswith("cache_hits") for event in hits)]))
"""


def run(folder, before="", **environment):
    environment = {"JAX_ENABLE_COMPILATION_CACHE": "true", **environment}
    said = python(
        SCRIPT.format(before=before),
        KERAS_BACKEND="jax",
        LOCKSTEP_REHEARSE="2",
        XDG_CACHE_HOME=str(folder),
        **environment,
    )
    return json.loads(said.splitlines()[-1])


@pytest.mark.whole
def test_the_second_start_finds_what_the_first_compiled(tmp_path):
    (where, none), (again, hits) = run(tmp_path), run(tmp_path)
    assert where == again
    assert Path(where).is_relative_to(tmp_path / "lockstep")
    assert none == 0
    assert hits >= 2  # the step, and the step for the last, smaller batch


@pytest.mark.whole
def test_what_the_user_chose_is_left_alone(tmp_path):
    own = str(tmp_path / "own")
    assert run(tmp_path, JAX_COMPILATION_CACHE_DIR=own)[0] == own
    assert run(tmp_path, JAX_ENABLE_COMPILATION_CACHE="false")[0] is None
    assert not (tmp_path / "lockstep").exists()


@pytest.mark.whole
def test_a_folder_that_cannot_be_made_is_done_without(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert run(tmp_path / "file")[0] is None


VERIFIED = """
import keras, numpy as np, jax
from jax import monitoring
from lockstep.engines import current_engine
made = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
made.compile("sgd", "mse")
probe, batch = current_engine().probe(made), (np.ones((4, 8), "float32"), np.ones((4, 1)))
with probe.precise():
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    probe.train(batch, restart=True)
    found = []
    monitoring.register_event_listener(lambda event, **_: found.append(event.split("/")[-1]))
    probe.train(batch, restart=True)
print("cache_hits" in found, "cache_misses" in found)
"""


def test_verify_compiles_a_step_that_it_traces_again_once(tmp_path):
    environment = {"JAX_ENABLE_COMPILATION_CACHE": "true", "XDG_CACHE_HOME": str(tmp_path)}
    assert python(VERIFIED, KERAS_BACKEND="jax", **environment).splitlines()[-1] == "True False"
