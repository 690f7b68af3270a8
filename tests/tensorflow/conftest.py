"""These tests need Keras on TensorFlow; any other process starts one that has it."""

import keras

if keras.backend.backend() == "tensorflow":
    collect_ignore = ["test_in_a_process_of_its_own.py"]
else:
    collect_ignore_glob = ["test_on_*.py"]
