"""Does plain Keras, in a fresh process and on one device, predict what the trained model does?

Every example ends with `check_file(path, model, x)`. The process that it starts is
this file run as a script: it imports Keras and not lockstep.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np


def check_file(path, model, x):
    """Compare the predictions of `model` with those of its file, or end the script."""
    import keras

    import lockstep

    rows = len(keras.tree.flatten(x)[0])
    with tempfile.TemporaryDirectory() as folder:
        arrays = Path(folder) / "arrays.npz"
        named = x if isinstance(x, dict) else {"": x}
        np.savez(
            arrays,
            predictions=model.predict(x, batch_size=rows, verbose=0),
            **{f"x:{name}": array for name, array in named.items()},
        )
        # One device: no rehearsal, and the CPU, because this process holds the GPUs.
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("LOCKSTEP", "JAX_"))}
        # GPUs multiply in a lower precision than CPUs (TF32) unless told otherwise.
        on_cpu = lockstep.devices()[0].startswith("cpu")
        plain.setdefault("CHECK_FILE_BOUND", "1e-5" if on_cpu else "1e-2")
        command = [sys.executable, __file__, str(path), str(arrays)]
        done = subprocess.run(command, env={**plain, "JAX_PLATFORMS": "cpu"}, check=False)
    if done.returncode != 0:
        sys.exit("The file is not the model.")


def main(path, arrays):
    import keras

    arrays = np.load(arrays)
    x = {name[2:]: arrays[name] for name in arrays if name.startswith("x:")}
    model = keras.models.load_model(path, compile=False)
    predictions = model.predict(x.get("", x), batch_size=len(arrays["predictions"]), verbose=0)
    difference = np.max(np.abs(predictions - arrays["predictions"]))
    imported = "lockstep" in sys.modules
    print(f"{Path(path).name} by plain Keras on one device: largest difference {difference:.1e}")
    bound = float(os.environ["CHECK_FILE_BOUND"])
    sys.exit(imported or not difference <= bound)


if __name__ == "__main__":
    main(*sys.argv[1:])
