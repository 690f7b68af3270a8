"""These tests need Keras on PyTorch: `KERAS_BACKEND=torch python -m pytest`."""

import keras
import numpy as np
import pytest

if keras.backend.backend() == "torch":
    # Before the shared cases, some of which make a loss when they are imported.
    import tests.torch.double  # noqa: F401

    collect_ignore = ["test_gpus.py"]

    @pytest.fixture(scope="session")
    def _holder():
        """The processes of three devices run as long as a model has them: this one does."""
        import lockstep

        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        yield lockstep.distribute(model, 3)
        lockstep.release(model)

    @pytest.fixture(autouse=True)
    def _warm_processes(_holder):
        """They are started anew if the test before has ended them."""
        _holder.predict_on_batch(np.ones((3, 1)))

else:
    collect_ignore_glob = ["test_on_*.py"]
