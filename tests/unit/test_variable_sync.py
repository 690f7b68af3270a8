"""Variables that share an array."""

import keras
import numpy as np

from lockstep.engines.jax.steps.variable_sync import unshare_arrays


def test_variables_that_share_an_array_get_one_each_and_others_keep_theirs():
    first, second, alone = (keras.Variable(np.arange(3.0)) for _ in range(3))
    second._value = first._value
    kept = first._value, alone._value
    unshare_arrays([first, second, alone])
    assert first._value is kept[0]
    assert alone._value is kept[1]
    assert second._value is not first._value
    np.testing.assert_array_equal(second.value, np.arange(3.0))
