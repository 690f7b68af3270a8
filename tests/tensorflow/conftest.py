"""These tests need Keras on TensorFlow: `KERAS_BACKEND=tensorflow python -m pytest`."""

import keras

if keras.backend.backend() != "tensorflow":
    collect_ignore_glob = ["test_on_*.py"]
