"""What a distributed model saves is what one device saves."""

import json
import subprocess
import sys
import zipfile

import h5py
import keras
import numpy as np
import pytest

import lockstep
from tests.conformance.common import assert_same, data, fit, model
from tests.conformance.zoo import ZOO
from tests.processes.common import clean_environment
from tests.tiers import rest

DATE = "date_saved"


def tree_of(archive):
    """The members of a `.keras` file, and the paths, shapes and types of its arrays."""
    with zipfile.ZipFile(archive) as members:
        names = sorted(members.namelist())
        config = json.loads(members.read("config.json"), object_hook=_without_addresses)
        metadata = json.loads(members.read("metadata.json"))
        with members.open("model.weights.h5") as file, h5py.File(file) as weights:
            arrays = {}
            weights.visititems(
                lambda path, item: (
                    arrays.update({path: (item.shape, str(item.dtype))})
                    if isinstance(item, h5py.Dataset)
                    else None
                )
            )
    metadata.pop(DATE)
    return names, config, metadata, arrays


def _without_addresses(config):
    """Keras writes where a shared object lay in memory, which no two runs agree on."""
    return {key: value for key, value in config.items() if key != "shared_object_id"}


SAMPLE = ["cnn", "nested_model", "subclassed", "several_inputs_and_outputs", "masked_lstm"]


@pytest.mark.parametrize("name", [*SAMPLE, *rest(*(name for name in ZOO if name not in SAMPLE))])
def test_same_config_and_same_paths_as_an_undistributed_twin(name, tmp_path):
    case = ZOO[name]
    trees = []
    for devices in (None, 3):
        keras.utils.clear_session(free_memory=False)
        made = case.build(case.dropout)
        made.compile("adam", case.loss, metrics=case.metrics)
        if devices:
            lockstep.distribute(made, devices)
        made.fit(*case.data(10, np.random.default_rng(0)), verbose=0)
        made.save(tmp_path / f"{devices}.keras")
        trees.append(tree_of(tmp_path / f"{devices}.keras"))
    assert trees[0] == trees[1]


def test_weights_file_has_the_same_paths(tmp_path):
    paths = []
    for devices in (None, 4):
        made = model()
        if devices:
            lockstep.distribute(made, devices)
        fit(made)
        made.save_weights(tmp_path / f"{devices}.weights.h5")
        with h5py.File(tmp_path / f"{devices}.weights.h5") as file:
            found = []
            file.visit(found.append)
        paths.append(found)
    assert paths[0] == paths[1]


def test_loads_in_a_process_that_has_never_heard_of_lockstep(tmp_path):
    made = lockstep.distribute(model(), 4)
    fit(made)
    made.save(tmp_path / "model.keras")
    x, _ = data()
    np.save(tmp_path / "x.npy", x)
    script = (
        "import sys; sys.modules['lockstep'] = None\n"
        "import jax, keras, numpy as np\n"
        "assert len(jax.devices()) == 1, jax.devices()\n"
        "model = keras.models.load_model('model.keras')\n"
        "np.save('y.npy', model.predict(np.load('x.npy'), verbose=0))\n"
        "model.fit(np.load('x.npy'), np.load('y.npy'), verbose=0)\n"
    )
    plain = clean_environment()
    plain["JAX_PLATFORMS"] = "cpu"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=plain, check=True)
    assert_same(np.load(tmp_path / "y.npy"), made.predict(x, verbose=0))


def test_a_loaded_model_goes_on_as_one_saved_by_one_device(tmp_path):
    histories = []
    for devices in (None, 4):
        made = model()
        if devices:
            lockstep.distribute(made, devices)
        fit(made)
        made.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        histories.append(fit(loaded))  # with the momentum that the file carries
    assert_same(histories[1], histories[0])
