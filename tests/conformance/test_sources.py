"""What a data source needs to be installed."""

from tests.processes.common import warm_python

_NUMPY_ONLY = """
import sys
{lockstep}
import keras, numpy as np
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
model.compile("sgd", "mse")
{distribute}
x, y = np.ones((7, 3), "float32"), np.ones((7, 2), "float32")
model.fit(x, y, batch_size=3, verbose=0)
model.evaluate(x, y, verbose=0)
model.predict(x, verbose=0)
others = {{"tensorflow", "torch", "grain"}}
print(sorted(others & {{name.split(".")[0] for name in sys.modules}}))
"""


def test_numpy_needs_no_more_than_keras_needs():

    alone = warm_python(_NUMPY_ONLY.format(lockstep="", distribute=""))
    distributed = warm_python(
        _NUMPY_ONLY.format(
            lockstep="import lockstep", distribute="lockstep.distribute(model, devices=3)"
        ),
        LOCKSTEP_REHEARSE="3",
    )
    assert distributed == alone == "[]"
