"""One script from a laptop to a cluster. It runs unchanged in each of these ways:

python anywhere.py
lockstep run --processes 2 anywhere.py
torchrun --nproc-per-node 2 anywhere.py
sbatch slurm.sh
kubectl apply -f train_job.yaml

On several machines, --folder is one that they share. Without GPUs, set LOCKSTEP_REHEARSE=2.
"""

import argparse
from pathlib import Path

import keras
import numpy as np
from keras import layers

import lockstep

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--samples", type=int, default=20011)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch", type=int, default=256, help="rows over all devices together")
parser.add_argument("--folder", type=Path, default=Path("runs/anywhere"))
options = parser.parse_args()

rank, _ = lockstep.initialize()  # joins the processes that a launcher has started

# The same data in every process, which trains on the rows of its own devices.
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(options.samples, 32)).astype("float32")
y = x[:, :8].argmax(axis=1)

model = keras.Sequential(
    [
        keras.Input((32,)),
        layers.Dense(64, activation="gelu"),
        layers.Dropout(0.1),
        layers.Dense(8, activation="softmax"),
    ]
)
lockstep.distribute(model)  # all devices of all processes
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
checkpoint = lockstep.Checkpoint(options.folder / "checkpoints")
model.fit(x, y, batch_size=options.batch, epochs=options.epochs, callbacks=[checkpoint], verbose=2)
model.save(options.folder / "model.keras")  # the first process writes

lockstep.release(model)  # each process has the whole model again
if rank == 0:
    from check_file import check_file

    check_file(options.folder / "model.keras", model, x[:8])
