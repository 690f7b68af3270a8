"""The old function, and the recipes that were written around it."""

import inspect
import warnings

import keras
import numpy as np
import pytest
from keras.callbacks import ModelCheckpoint

import lockstep
from lockstep import multi_gpu_model
from lockstep.errors import DeviceError, NothingToDoWarning
from tests.conformance.common import assert_same, compile_, data, devices_of, fit, model


def test_the_signature_is_the_old_one():
    parameters = inspect.signature(multi_gpu_model).parameters
    assert list(parameters) == ["model", "gpus", "cpu_merge", "cpu_relocation"]
    assert {name: p.default for name, p in parameters.items() if name != "model"} == {
        "gpus": None,
        "cpu_merge": True,
        "cpu_relocation": False,
    }


@pytest.mark.parametrize(
    ("gpus", "devices"), [(None, 8), (2, 2), (4, 4), ([0, 2], 2), ((1, 3, 5), 3), (1, 1), ([0], 1)]
)
def test_every_old_call_is_accepted(gpus, devices):
    made = model()
    parallel_model = multi_gpu_model(made, gpus=gpus)
    assert parallel_model is made
    assert devices_of(made) == {devices}


def test_positional_arguments():
    made = model()
    with pytest.warns(NothingToDoWarning) as said:
        assert multi_gpu_model(made, 2, False, True) is made
    assert [str(w.message).split()[0] for w in said] == ["cpu_merge=False", "cpu_relocation=True"]


def test_the_usual_arguments_say_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        multi_gpu_model(model(), gpus=2, cpu_merge=True, cpu_relocation=False)


def test_more_gpus_than_there_are():
    with pytest.raises(DeviceError, match="devices=16 was requested, but only 8 are available"):
        multi_gpu_model(model(), gpus=16)


def test_the_old_recipe(tmp_path):
    truth = model()
    fit(truth, epochs=2)

    template = model(compiled=False)
    parallel_model = multi_gpu_model(template, gpus=4)
    compile_(parallel_model)
    whole = str(tmp_path / "whole.{epoch:02d}.keras")
    only = str(tmp_path / "best.weights.h5")
    fit(
        parallel_model,
        epochs=2,
        validation_data=data(9),
        callbacks=[
            ModelCheckpoint(whole),
            ModelCheckpoint(only, save_weights_only=True, save_best_only=True),
        ],
    )
    template.save(tmp_path / "template.keras")
    parallel_model.save(tmp_path / "parallel.keras")
    parallel_model.save_weights(tmp_path / "parallel.weights.h5")

    x, _ = data()
    expected = truth.predict(x, verbose=0)
    for name in ("template.keras", "parallel.keras", "whole.02.keras"):
        loaded = keras.models.load_model(tmp_path / name)
        assert_same(loaded.predict(x, verbose=0), expected)
    for name in ("parallel.weights.h5", "best.weights.h5"):
        loaded = model(compiled=False, seed=99)
        loaded.load_weights(tmp_path / name)
        assert np.isfinite(loaded.predict(x, verbose=0)).all()
        multi_gpu_model(loaded, gpus=2).load_weights(tmp_path / name)
    assert_same(parallel_model.predict(x, verbose=0), expected)


class ParallelModelCheckpoint(ModelCheckpoint):
    """As it was written under many an answer: it saves the model it was given."""

    def __init__(self, model, filepath, **kwargs):
        self.single_model = model
        super().__init__(filepath, **kwargs)

    def set_model(self, model):
        super().set_model(self.single_model)


def test_a_hand_written_parallel_model_checkpoint(tmp_path):
    template = model(compiled=False)
    parallel_model = multi_gpu_model(template, gpus=3)
    compile_(parallel_model)
    path = tmp_path / "best.keras"
    checkpoint = ParallelModelCheckpoint(template, path, monitor="loss", save_best_only=True)
    fit(parallel_model, callbacks=[checkpoint])
    x, _ = data()
    loaded = keras.models.load_model(path)
    assert_same(loaded.predict(x, verbose=0), template.predict(x, verbose=0))


def test_a_callback_that_saves_the_template_each_epoch(tmp_path):
    template = model(compiled=False)
    parallel_model = multi_gpu_model(template, gpus=3)
    compile_(parallel_model)
    path = tmp_path / "model.{}.keras"

    class Save(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            template.save(str(path).format(epoch))

    fit(parallel_model, epochs=2, callbacks=[Save()])
    x, _ = data()
    loaded = keras.models.load_model(str(path).format(1))
    assert_same(loaded.predict(x, verbose=0), parallel_model.predict(x, verbose=0))


def test_two_calls_on_one_model_move_it():
    made = model()
    multi_gpu_model(made, gpus=4)
    assert devices_of(multi_gpu_model(made, gpus=2)) == {2}
    assert devices_of(lockstep.release(made)) == {1}
