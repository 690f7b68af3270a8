"""Trainings by Ray Train, for the tests: python ray_cases.py CASE FOLDER WORKERS [FAULT RANK]."""

import os
import sys
from pathlib import Path

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
    given["scaling_config"] = ScalingConfig(num_workers=workers, placement_strategy="SPREAD")
    if case == "TorchTrainer":
        return TorchTrainer(train, **given)
    return DataParallelTrainer(late if case == "late" else train, **given)


PASSED_ON = ("KERAS_", "LOCKSTEP_", "JAX_", "PYTHONPATH", "OMP_", "RANK", "WORLD_SIZE", "MASTER_")


def main(case, folder, workers, *fault):
    ray.init(os.environ["RAY_ADDRESS"], logging_level="ERROR")
    options = {"folder": folder, "fault": fault}
    print("returned", trainer_of(case, options, int(workers)).fit().return_value)


if __name__ == "__main__":
    main(*sys.argv[1:])
