"""JAX on pretended TPUs: the code for them runs, and leaves what one device leaves."""

import pytest

from tests.pretended_gpus import test_jax as on_gpus
from tests.pretended_gpus.common import run
from tests.pretended_gpus.conditions import TPU, unseen


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A function that runs Python on pretended TPUs, each command once."""
    return on_gpus.runner(tmp_path_factory, tpus=True)


def test_a_training_on_several_tpus_leaves_what_one_device_leaves(ran):
    on_gpus.others(ran, "numbers")


@pytest.mark.thorough
@pytest.mark.parametrize("program", on_gpus.OTHERS[1:])
def test_everything_else_leaves_what_one_device_leaves(ran, program):
    on_gpus.others(ran, program)


@pytest.mark.thorough
def test_the_commands_say_that_no_tpu_has_run_lockstep(ran):
    said = on_gpus.doctor(ran)
    assert "tpu:0, tpu:1: training gives the same results as on one device." in said
    assert "Lockstep has not yet been run on a TPU" in said
    assert "2 devices give the same results as one device." in on_gpus.verified(ran)
    assert '[["tpu:0"], ["tpu:0", "tpu:1"]]' in on_gpus.tools(ran)


@pytest.mark.thorough
def test_a_tpu_is_not_shared(tmp_path):
    shared = {"engine": "jax", "devices": 2, "cwd": tmp_path, "PRETENDED_TPUS": "2"}
    said = run("-c", on_gpus.SHARED, **shared, LOCKSTEP_SHARE_GPU="2")
    assert "LOCKSTEP_SHARE_GPU=2 was set, but the devices are TPUs" in said


@pytest.mark.thorough
def test_every_condition_on_devices_and_places_had_the_values_of_tpus(ran):
    on_gpus.branches_and_draws(ran)
    for devices in (1, 2):
        on_gpus.in_processes(ran, devices)
        on_gpus.sharded_in_processes(ran, devices)
    for program in on_gpus.OTHERS:
        on_gpus.others(ran, program)
    for each in (on_gpus.tools, on_gpus.doctor, on_gpus.verified):
        each(ran)
    ran("-c", on_gpus.SHARED, devices=1, LOCKSTEP_SHARE_GPU="2")
    of_others = ("engines/tensorflow/", "engines/torch/")
    assert not unseen(ran.notes, on_gpus.NOT_REACHED, but=of_others, kind=TPU)
