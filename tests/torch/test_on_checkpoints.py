"""`lockstep.Checkpoint` on PyTorch; a layer may have a buffer that no checkpoint saves."""

import keras
import pytest
import torch
from keras import layers

import lockstep
from lockstep.errors import UnsupportedModel
from tests.checkpoints.data import arrays
from tests.replicas.checkpoints import *  # noqa: F403
from tests.replicas.checkpoints import CustomStep


class Counted(layers.Layer):
    """Has a buffer of PyTorch, which is no variable of Keras."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("count", torch.zeros(()))

    def call(self, x):
        return x


@pytest.mark.parametrize("made_in_it", [keras.optimizers.Adam, Counted])
def test_what_a_step_may_change_and_no_checkpoint_saves_is_refused(made_in_it, tmp_path):
    made = CustomStep([keras.Input((4,)), layers.Dense(2)], name="gan")
    made.compile("sgd", "mse")
    made.other = made_in_it()
    lockstep.distribute(made, 2)
    with pytest.raises(UnsupportedModel, match=r"may change other.* of 'gan', but"):
        made.fit(**arrays(), verbose=0, callbacks=[lockstep.Checkpoint(tmp_path)])


def test_a_buffer_of_a_layer_of_a_sequential_model_is_refused(tmp_path):
    made = keras.Sequential([keras.Input((4,)), Counted(name="counted"), layers.Dense(2)])
    made.compile("sgd", "mse")
    lockstep.distribute(made, 2)
    with pytest.raises(UnsupportedModel, match="may change count of 'counted', but"):
        made.fit(**arrays(), verbose=0, callbacks=[lockstep.Checkpoint(tmp_path)])
