"""Each process reads its own files: no machine needs them all, and the numbers are those of one.

lockstep run --processes 2 own_rows.py
torchrun --nproc-per-node 2 own_rows.py

Seven files of different length are dealt out to the processes, which then have other numbers of
rows and batches. Nothing has to be padded, repeated or left out: one whose files have ended takes
part without rows until all have ended.
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
parser.add_argument("--rows", type=int, default=2000, help="rows of the longest file")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch", type=int, default=256, help="rows over all processes together")
parser.add_argument("--folder", type=Path, default=Path("runs/own_rows"))
options = parser.parse_args()

rank, size = lockstep.initialize()

# The files would be there already. Here each process makes those that it is going to read.
names = [f"train-{number}.npz" for number in range(7)]
mine = names[rank::size]
options.folder.mkdir(parents=True, exist_ok=True)
for name in mine:
    number = names.index(name)
    rng = np.random.default_rng(number)
    x = rng.normal(size=(max(1, options.rows - 130 * number), 16)).astype("float32")
    np.savez(options.folder / name, x=x, y=x[:, :4].argmax(axis=1))


def batches():
    """One pass over the files of this process, in an order of its own."""
    share = max(1, options.batch // size)
    for name in np.random.permutation(mine):
        with np.load(options.folder / name) as file:
            x, y = file["x"], file["y"]
        for start in range(0, len(x), share):
            yield x[start : start + share], y[start : start + share]


keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((16,)),
        layers.Dense(32, activation="gelu"),
        layers.BatchNormalization(),  # the moments of the rows of all processes
        layers.Dense(4, activation="softmax"),
    ]
)
lockstep.distribute(model)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(lockstep.process_local(batches), epochs=options.epochs, verbose=2)

scores = model.predict(lockstep.process_local(batches), verbose=0)
print(f"process {rank} has read {len(mine)} files, and predicted its {len(scores)} rows")
model.save(options.folder / "model.keras")  # the first process writes

lockstep.release(model)
if rank == 0:
    from check_file import check_file

    check_file(options.folder / "model.keras", model, np.ones((8, 16), "float32"))
