"""Trainings by Ray Train, for the tests: python ray_cases.py CASE FOLDER WORKERS [FAULT RANK]."""

import os
import pickle
import sys
from pathlib import Path

import numpy as np
import ray
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.jax import JaxConfig, JaxTrainer

ROOT = Path(__file__).parents[2]


def train(options):
    """The training of `train.py`, or of `torch_train.py`, in a worker."""
    import lockstep

    place = lockstep.initialize()
    if os.environ["KERAS_BACKEND"] == "torch":
        from tests.launch.torch_train import main
    else:
        from tests.launch.train import main
    main(Path(options["folder"]), *options["fault"])
    return place


def small():
    import keras

    from lockstep.keras_compat import compute_in_float64

    compute_in_float64()
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


EPOCHS = 2


def own_rows(options):
    """Each worker trains on its shard of Ray Data, and notes the batches that it has got."""
    import lockstep

    rank, _ = lockstep.initialize()

    import keras

    shard, passes = ray.train.get_dataset_shard("train"), []

    def batches():
        passes.append([])
        for batch in shard.iter_batches(batch_size=5 if rank else 7):
            passes[-1].append((batch["x"], batch["y"]))
            yield passes[-1][-1]

    model = lockstep.distribute(small())
    model.fit(lockstep.process_local(batches), epochs=EPOCHS, shuffle=False, verbose=2)
    values = [keras.ops.convert_to_numpy(each.value) for each in model.variables]
    found = pickle.dumps((passes[-EPOCHS:], values))
    Path(options["folder"], f"rows-{rank}.pickle").write_bytes(found)


def rows_of_ray_data():
    """Items of two blocks of other sizes."""
    rng = np.random.default_rng(0)
    rows = [{"x": rng.normal(size=6), "y": rng.normal(size=3)} for _ in range(53)]
    return ray.data.from_items(rows, override_num_blocks=8)


def distance_from_one_device(folder, workers):
    """How far the weights are from those of stock Keras on the joined batches."""
    import keras

    files = [Path(folder, f"rows-{rank}.pickle") for rank in range(workers)]
    every = [pickle.loads(file.read_bytes()) for file in files]
    plain = small()
    for number in range(EPOCHS):
        passes = [passes[number] for passes, _ in every]
        assert len({len(batches) for batches in passes}) == workers, "uneven ends"
        for step in range(max(map(len, passes))):
            parts = [batches[step] for batches in passes if step < len(batches)]
            plain.train_on_batch(*map(np.concatenate, zip(*parts, strict=True)))
    wanted = [keras.ops.convert_to_numpy(each.value) for each in plain.variables]
    return max(
        float(np.max(np.abs(mine - other), initial=0.0))
        for _, values in every
        for mine, other in zip(values, wanted, strict=True)
    )


def late(_options):
    """A worker that has started JAX before it joins the others."""
    import keras

    import lockstep

    keras.ops.zeros(3)
    lockstep.initialize()


def gpus(_options):
    """What a worker takes of the GPUs of its node."""
    from lockstep.initialize import place_of_this_process
    from lockstep.processes.shares import devices_of_process

    place = place_of_this_process(os.environ)
    visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    mine = devices_of_process(place, len(visible))
    print("takes", ",".join(visible if mine is None else [visible[n] for n in mine]))


def trainer_of(case, options, workers):
    own = {"env_vars": {n: v for n, v in os.environ.items() if n.startswith(PASSED_ON)}}
    run = RunConfig(
        failure_config=FailureConfig(1 if options["fault"] else 0, controller_failure_limit=1),
        worker_runtime_env=own,
        storage_path=str(Path(options["folder"]).with_name("ray")),
        logging_config=LoggingConfig("ERROR"),
    )
    given = {"train_loop_config": options, "run_config": run}
    if case.startswith("gpus"):
        given["scaling_config"] = ScalingConfig(
            num_workers=workers, use_gpu=True, placement_strategy="PACK"
        )
        kinds = {
            "gpus": (DataParallelTrainer, {}),
            "gpus of JaxTrainer": (JaxTrainer, {}),
            "gpus of JaxTrainer with JaxConfig()": (JaxTrainer, {"jax_config": JaxConfig()}),
        }
        kind, more = kinds[case]
        return kind(gpus, **given, **more)
    spread = {"num_workers": workers, "placement_strategy": "SPREAD"}
    if case == "own rows":
        given["datasets"] = {"train": rows_of_ray_data()}
        # Ray Data needs a CPU of a node too.
        spread["resources_per_worker"] = {"CPU": 0.5}
        return DataParallelTrainer(own_rows, scaling_config=ScalingConfig(**spread), **given)
    given["scaling_config"] = ScalingConfig(**spread)
    if case == "TorchTrainer":
        return TorchTrainer(train, **given)
    return DataParallelTrainer(late if case == "late" else train, **given)


PASSED_ON = ("KERAS_", "LOCKSTEP_", "JAX_", "PYTHONPATH", "OMP_", "RANK", "WORLD_SIZE", "MASTER_")


def main(case, folder, workers, *fault):
    ray.init(os.environ["RAY_ADDRESS"], logging_level="ERROR")
    options = {"folder": folder, "fault": fault}
    print("returned", trainer_of(case, options, int(workers)).fit().return_value)
    if case == "own rows":
        print("far", distance_from_one_device(folder, int(workers)))


if __name__ == "__main__":
    main(*sys.argv[1:])
