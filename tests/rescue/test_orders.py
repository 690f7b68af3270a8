"""Which layer of a live model gets which weights, where order and names both speak."""

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.errors import AmbiguousWeights
from tests.rescue import old_files
from tests.rescue.old_files import numbers, single_weights


def branches():
    """Its layers lie in another order than that in which they are made."""
    start = keras.Input((8, 8, 3))
    one = layers.Conv2D(4, 1)(start)
    other = layers.Conv2D(4, 3, padding="same")(layers.Conv2D(4, 1)(start))
    joined = layers.GlobalAveragePooling2D()(layers.Concatenate()([one, other]))
    return keras.Model(start, layers.Dense(2)(joined))


@pytest.mark.parametrize("parallel", [True, False])
def test_branches_lie_in_the_order_of_the_model_under_other_numbers(tmp_path, parallel):
    keras.utils.clear_session(free_memory=False)
    model, groups, made = branches(), [], {}
    for layer in model.layers:
        if layer.weights:  # conv2d, conv2d_1, ... were conv2d_1, conv2d_2, ... in Keras 2
            kind, _, number = layer.name.partition("_")
            made[layer.name] = name = f"{kind}_{int(number or 0) + 1}"
            value = [(f"{name}/{w.name}:0", numbers(*w.shape)) for w in layer.weights]
            groups.append((name, value))
    convolutions = [name for name in made.values() if name.startswith("conv2d")]
    assert convolutions != sorted(convolutions), "the case needs layers that lie in another order"
    if parallel:
        flat = [weight for _, weights in groups for weight in weights]
        old = old_files.parallel_weights(tmp_path / "old.h5", flat)
    else:
        old = single_weights(tmp_path / "old.h5", groups, "2.2.4")
    keras.utils.clear_session(free_memory=False)
    numbered = branches(), branches()
    for fresh in numbered:  # one with the numbers of a new session, one with later ones
        lockstep.load_weights(fresh, old)
        for layer, (_, wanted) in zip((x for x in fresh.layers if x.weights), groups, strict=True):
            for found, (_, value) in zip(layer.get_weights(), wanted, strict=True):
                np.testing.assert_array_equal(found, value)


def test_a_name_that_the_user_gave_does_not_go_to_another_layer(tmp_path):
    groups = [
        (name, [(f"{name}/kernel:0", numbers(5, 5)), (f"{name}/bias:0", numbers(5))])
        for name in ("encoder", "decoder")
    ]
    old = single_weights(tmp_path / "old.h5", groups, "2.2.4")
    first, last = layers.Dense(5, name="decoder"), layers.Dense(5, name="head")
    with pytest.raises(AmbiguousWeights, match="'decoder' belong to 'head'"):
        lockstep.load_weights(keras.Sequential([keras.Input((5,)), first, last]), old)
