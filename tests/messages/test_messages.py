"""The texts of errors: both values, why, and the one thing to do next."""

import keras
import pytest

import lockstep
from lockstep import errors
from lockstep.devices import Device, parse_devices
from tests.conformance.common import data, model

ONE = [Device("cpu:0", "cpu")]


def text_of(call, *args):
    with pytest.raises(errors.LockstepError) as caught:
        call(*args)
    text = str(caught.value)
    assert len(text.splitlines()) <= 3
    assert max(map(len, text.splitlines())) <= 200
    return text


def test_more_devices_than_there_are():
    assert text_of(parse_devices, 4, ONE) == (
        "devices=4 was asked for, and 1 is here: cpu:0.\n"
        "To rehearse on virtual CPU devices, set LOCKSTEP_REHEARSE=4 before Python starts\n"
        "(or call lockstep.rehearse(devices=4) before the first Keras operation)."
    )


def test_an_unknown_device():
    assert text_of(parse_devices, "gpu:3", ONE) == (
        "devices='gpu:3' was asked for, and gpu:3 is not among the 1 here: cpu:0.\n"
        "To rehearse on virtual CPU devices, set LOCKSTEP_REHEARSE=4 before Python starts\n"
        "(or call lockstep.rehearse(devices=4) before the first Keras operation)."
    )


def test_zero_devices():
    assert text_of(parse_devices, 0, ONE) == (
        "devices=0 was asked for, and at least one device has to train.\n"
        "Say 1 to 1, or None for all that are here: cpu:0."
    )


def test_a_device_twice():
    assert text_of(parse_devices, [0, 0], ONE) == (
        "devices=[0, 0] names cpu:0 twice, and a device holds one replica.\n"
        "Name each device once; 1 are here: cpu:0."
    )


@pytest.mark.parametrize(
    ("thing", "got"),
    [
        (None, "a NoneType object"),
        ("model", "a str object"),
        (keras.Sequential, "the class Sequential"),
        (keras.layers.Dense(1), "a Dense object"),
    ],
)
def test_something_that_is_no_model(thing, got):
    text = text_of(lockstep.distribute, thing, 2)
    assert text.startswith(f"A Keras model was expected, and this is {got}.")
    text_of(lockstep.release, thing)


def test_a_global_keras_distribution():
    made = model()
    distribution = keras.distribution.DataParallel(devices=["cpu:0"])
    with distribution.scope():
        text = text_of(lockstep.distribute, made, 2)
    assert text.startswith("A global keras.distribution is set (DataParallel)")
    lockstep.distribute(made, 2)
    with distribution.scope():  # set afterwards, it is refused as soon as it would count
        assert text_of(lambda: made.fit(*data(), verbose=0)) == text


def test_a_model_laid_out_by_another_tool():
    distribution = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
    with distribution.scope():
        made = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(1, name="laid_out")], name="mine"
        )
    text = text_of(lockstep.distribute, made, 2)
    assert text.startswith("Variable 'mine/laid_out/kernel' of 'mine'")
    assert "is laid out by another tool (TensorLayout)" in text
    assert not [name for name in vars(made) if "lockstep" in name]


def test_another_backend(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    assert text_of(lockstep.distribute, model(), 2) == (
        "Keras runs on 'torch', and lockstep has engines for 'jax' and 'tensorflow' so far;\n"
        "a .keras file moves between backends. Set KERAS_BACKEND=jax before Keras is imported."
    )


def test_a_class_with_its_own_function_maker():
    class Own(keras.Sequential):
        def make_train_function(self, force=False):
            return super().make_train_function(force)

    text = text_of(lockstep.distribute, Own([keras.Input((2,)), keras.layers.Dense(1)]), 2)
    assert text.startswith("Own has its own make_train_function")


def test_an_instance_with_step_functions_of_its_own():
    made = model()
    made.make_train_function = lambda force=False: None
    text = text_of(lockstep.distribute, made, 2)
    assert text.startswith(f"{made.name!r} has its own make_train_function")
    made = model()
    made.train_function = lambda state, iterator: None
    text = text_of(lockstep.distribute, made, 2)
    assert text.startswith(f"{made.name!r} was given a train_function")


def test_steps_per_execution_that_is_no_number():
    made = lockstep.distribute(model(compiled=False), 2)
    made.compile("sgd", "mse", steps_per_execution=2.5)
    text = text_of(lambda: made.fit(*data(), verbose=0))
    assert text.startswith("compile(steps_per_execution=2.5) was asked for")


def test_auto_steps_per_execution_in_a_class_with_its_own_loop():
    class Own(keras.Sequential):
        def evaluate(self, *args, **kwargs):
            return super().evaluate(*args, **kwargs)

    made = Own([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse", steps_per_execution="auto")
    text = text_of(lambda: lockstep.distribute(made, 2).fit(*data(), verbose=0))
    assert text.startswith("compile(steps_per_execution='auto') was asked for, and Own has its own")


def test_variables_shared_with_a_model_elsewhere():
    shared = keras.layers.Dense(1, name="shared")
    first = keras.Sequential([keras.Input((2,)), shared], name="first")
    second = keras.Sequential([keras.Input((2,)), shared], name="second")
    lockstep.distribute(first, 2)
    assert text_of(lockstep.distribute, second, 4) == (
        "'second' was asked onto cpu:0 to cpu:3, and its variable 'first/shared/kernel' is "
        "shared with 'first' on cpu:0, cpu:1.\n"
        "A variable has one layout. Distribute both to the same devices, or call\n"
        "lockstep.release on the other one first."
    )


def test_a_failed_distribute_leaves_the_model_where_it_was():
    made = lockstep.distribute(model(), 3)
    text_of(lockstep.distribute, made, 99)
    assert {len(v.value.devices()) for v in made.variables} == {3}


def test_every_error_is_a_lockstep_error_and_drawn_in_the_tree():
    for name, item in vars(errors).items():
        if isinstance(item, type) and item.__module__ == errors.__name__:
            assert issubclass(item, errors.LockstepError | errors.LockstepWarning)
            assert name in errors.__doc__
