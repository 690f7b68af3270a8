"""One training on the nodes of a Ray cluster, started and restarted by Ray Train.

python ray_train.py --workers 2
ray job submit --working-dir . -- python ray_train.py --workers 2

Each worker is one process of the training. With `--gpus 4`, each has 4 GPUs (on PyTorch: 1). After
a failure, Ray Train starts all workers again, up to `--restarts` times, and they go on at the last
checkpoint. Another call with another number of workers goes on, too. --folder is one that all nodes
share. Without GPUs, set LOCKSTEP_REHEARSE=2.
"""

import argparse
import os
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer


def train(options):
    """Train in one worker. Ray Train calls this function in each."""
    import lockstep  # before the first Keras operation

    rank, _ = lockstep.initialize()  # joins the workers

    import keras
    import numpy as np

    # The same data in every worker, which trains on the rows of its own devices.
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(options["samples"], 32)).astype("float32")
    y = x[:, :8].argmax(axis=1)
    model = keras.Sequential(
        [
            keras.Input((32,)),
            keras.layers.Dense(64, activation="gelu"),
            keras.layers.Dense(8, activation="softmax"),
        ]
    )
    lockstep.distribute(model)  # all devices of all workers
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    # Ray Train calls this function in a thread, where no signal handler can save: save by steps.
    folder = Path(options["folder"])
    checkpoint = lockstep.Checkpoint(folder / "checkpoints", steps=options["save_every"])
    history = model.fit(
        x,
        y,
        batch_size=options["batch"],
        epochs=options["epochs"],
        callbacks=[checkpoint],
        verbose=2,
    )
    model.save(folder / "model.keras")  # the first worker writes
    return {"rank": rank, "loss": history.history["loss"][-1]}


def main():
    """Start the workers, and print what the first one returns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=0, help="of each worker")
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--samples", type=int, default=20011)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=256, help="rows over all devices together")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--folder", type=Path, default=Path("runs/ray_train"))
    options = parser.parse_args()

    folder = options.folder.absolute()
    passed_on = ("KERAS_BACKEND", "LOCKSTEP_REHEARSE")
    trainer = DataParallelTrainer(
        train,
        train_loop_config={**vars(options), "folder": str(folder)},
        scaling_config=ScalingConfig(
            num_workers=options.workers,
            resources_per_worker={"CPU": 1, "GPU": options.gpus} if options.gpus else {"CPU": 1},
            use_gpu=options.gpus > 0,
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(
            storage_path=str(folder / "ray"),
            # Without the second limit, a cluster with too few nodes is waited for without an end.
            failure_config=FailureConfig(options.restarts, controller_failure_limit=1),
            worker_runtime_env={
                "env_vars": {name: os.environ[name] for name in passed_on if name in os.environ}
            },
        ),
    )
    print("worker 0 returned", trainer.fit().return_value)


if __name__ == "__main__":
    main()
