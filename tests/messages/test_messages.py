"""The texts of errors: both values, why, and the one thing to do next."""

import threading

import keras
import numpy as np
import pytest

import lockstep
from lockstep import errors, keras_compat
from lockstep.core.devices import Device, parse_devices
from tests.conformance.common import data, model
from tests.processes.common import warm_python

ONE = [Device("cpu:0", "cpu")]
FOUR_GPUS = [Device(f"gpu:{number}", "NVIDIA H200") for number in range(4)]


def text_of(call, *args):
    with pytest.raises(errors.LockstepError) as caught:
        call(*args)
    text = str(caught.value)
    assert len(text.splitlines()) <= 3
    assert max(map(len, text.splitlines())) <= 200
    return text


def test_more_devices_than_there_are():
    assert text_of(parse_devices, 4, ONE) == (
        "devices=4 was requested, but only 1 is available: cpu:0.\n"
        "To rehearse on virtual CPU devices, set LOCKSTEP_REHEARSE=4 before Python starts\n"
        "(or call lockstep.rehearse(devices=4) before the first Keras operation)."
    )


def test_an_unknown_device():
    assert text_of(parse_devices, "gpu:3", ONE) == (
        "devices='gpu:3' was requested, but gpu:3 is not among the 1 available: cpu:0.\n"
        "To rehearse on virtual CPU devices, set LOCKSTEP_REHEARSE=4 before Python starts\n"
        "(or call lockstep.rehearse(devices=4) before the first Keras operation)."
    )


def test_a_gpu_in_a_rehearsal():
    four = [Device(f"cpu:{number}", "cpu") for number in range(4)]
    assert text_of(parse_devices, "gpu:3", four) == (
        "devices='gpu:3' was requested, but gpu:3 is not among the 4 available: cpu:0 to "
        "cpu:3.\n"
        "Did you mean cpu:3? The virtual devices of a rehearsal are CPU devices."
    )


@pytest.mark.parametrize(
    ("asked", "here", "remedy"),
    [
        ("cpuu:0", ONE, "Did you mean cpu:0?"),
        ("gppu:1", FOUR_GPUS, "Did you mean gpu:1?"),
        ("cudda:1", FOUR_GPUS, "Did you mean gpu:1?"),
        ("cpuu:3", ONE, "To rehearse on virtual CPU devices, set LOCKSTEP_REHEARSE=4 before"),
        ("printer:0", ONE, "Name available devices, such as cpu:0."),
        ("cpu0", ONE, "Did you mean cpu:0? Names look like 'gpu:0'"),
        ("gpu0", ONE, "Names look like 'gpu:0'"),
    ],
)
def test_a_misspelt_device(asked, here, remedy):
    """`cpuu:0` was taken for a GPU of that number."""
    assert text_of(parse_devices, asked, here).splitlines()[1].startswith(remedy)


def test_zero_devices():
    assert text_of(parse_devices, 0, ONE) == (
        "devices=0 was requested, but at least one device is needed.\n"
        "Pass 1, or None for all available devices: cpu:0."
    )


def test_a_device_twice():
    assert text_of(parse_devices, [0, 0], ONE) == (
        "devices=[0, 0] names cpu:0 twice, but a device holds only one replica.\n"
        "Name each device once. 1 is available: cpu:0."
    )


@pytest.mark.parametrize("thing", ["instance", "class"])
def test_a_model_of_legacy_keras_2(thing):
    """It was refused as "a Sequential object", and a Keras model was expected."""
    # What `tf_keras.Sequential` is, as far as it is looked at; the user's class inherits from it.
    legacy = type("Sequential", (), {"__module__": "tf_keras.src.engine.sequential"})
    mine = type("Mine", (legacy,), {"__module__": "__main__"})
    assert text_of(lockstep.distribute, mine() if thing == "instance" else mine) == (
        "A Keras 3 model was expected, but got a model of tf_keras, which is Keras 2.\n"
        "Build it with `import keras`; where tf.keras is used, unset TF_USE_LEGACY_KERAS. For "
        "its weights,\n"
        "save them as .h5 with Keras 2, then lockstep.load_weights(model, file)."
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
    assert text.startswith(f"A Keras model was expected, but got {got}.")
    text_of(lockstep.release, thing)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "first_process was given 3, but a Keras callback, or a function that"),
        (lambda: None, "first_process was given None, but a Keras callback"),
        (lambda: lockstep.Checkpoint("runs"), "first_process was given a lockstep.Checkpoint"),
        (
            lockstep.Checkpoint,
            "first_process was given a lockstep.Checkpoint, which must run in every",
        ),
    ],
)
def test_something_that_the_first_process_cannot_call_for_all(given, said):
    assert text_of(lockstep.first_process, given).startswith(said)


def test_a_callback_of_the_first_process_is_the_callback_in_one_process():
    callback = keras.callbacks.Callback()
    assert lockstep.first_process(callback) is callback
    assert type(lockstep.first_process(keras.callbacks.History)) is keras.callbacks.History
    assert lockstep.is_first()


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
    monkeypatch.setattr(keras.backend, "backend", lambda: "openvino")
    assert text_of(lockstep.distribute, model(), 2) == (
        "Keras runs on 'openvino', but lockstep supports only 'jax', 'tensorflow' and 'torch'.\n"
        "A .keras file can be loaded on any backend. Set KERAS_BACKEND=jax before Keras is "
        "imported."
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
    assert text.startswith(f"{made.name!r} already has a custom train_function")


@pytest.mark.parametrize("times", [2.5, "auto", 0])
def test_steps_per_execution_that_is_no_number(times):
    made = lockstep.distribute(model(compiled=False), 2)
    made.compile("sgd", "mse", steps_per_execution=times)
    for call in (made.fit, made.evaluate, made.train_on_batch):
        assert text_of(call, *data()) == (
            f"compile(steps_per_execution={times!r}) was requested, but a whole number of at "
            "least 1 is needed.\n"
            "Try 10; lockstep bench suggests a number."
        )


def test_variables_shared_with_a_model_elsewhere():
    shared = keras.layers.Dense(1, name="shared")
    first = keras.Sequential([keras.Input((2,)), shared], name="first")
    second = keras.Sequential([keras.Input((2,)), shared], name="second")
    lockstep.distribute(first, 2)
    assert text_of(lockstep.distribute, second, 4) == (
        "'second' cannot be distributed to cpu:0 to cpu:3, because its variable "
        "'first/shared/kernel' is shared with 'first' on cpu:0, cpu:1.\n"
        "A variable has one layout. Give both models the same devices, or call\n"
        "lockstep.release on the other model first."
    )


def test_a_callback_that_computes_with_models_on_different_devices():
    first, second = lockstep.distribute(model(), 3), lockstep.distribute(model(), 2)
    first.name, second.name = "trained", "averaged"

    class Average(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            for mine, its in zip(second.weights, first.weights, strict=True):
                mine.assign(0.9 * mine + 0.1 * its)

    assert text_of(lambda: first.fit(*data(), verbose=0, callbacks=[Average()])) == (
        "'trained' is on cpu:0 to cpu:2, but one of its callbacks combines its variables with "
        "those of 'averaged'\n"
        "on cpu:0, cpu:1: JAX needs the same devices. Distribute both models to the same "
        "devices, or\n"
        "read the values first: variable.numpy()."
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


@pytest.mark.parametrize("version", ["3.12.0", "3.15.0", "3.17.0", "3.17.0.dev2027010101", "4.0"])
def test_a_keras_that_was_not_checked(version):
    assert text_of(keras_compat.check_version, version) == (
        f"Keras {version} is installed, but lockstep needs keras>=3.15.1,<3.17:\n"
        "it uses private Keras functions, which were tested only with these versions.\n"
        'Run pip install "keras>=3.15.1,<3.17"'
    )


@pytest.mark.parametrize("version", ["3.15.1", "3.15.2", "3.16.0.dev2026102704", "3.16.4"])
def test_a_keras_that_was_checked(version):
    keras_compat.check_version(version)


@pytest.mark.parametrize(
    ("without", "name"),
    [
        ("del where.EpochIterator", "keras.src.trainers.epoch_iterator.EpochIterator"),
        ("del where.EpochIterator._enumerate_iterator", "EpochIterator._enumerate_iterator"),
        ("it = keras.utils.Progbar; it.__init__ = it.update = None", "Progbar._last_update"),
    ],
)
def test_a_keras_that_lacks_a_private_part(without, name):
    script = (
        f"import keras; from keras.src.trainers import epoch_iterator as where; {without}\n"
        "import lockstep\n"
        "try: lockstep.devices()\n"
        "except lockstep.errors.UnsupportedKeras as error: print(error)"
    )
    assert warm_python(script) == (
        f"Keras {keras.__version__} has no {name}, which lockstep needs:\n"
        "this is private in Keras 3.15.1, and may change in any version.\n"
        'Run pip install "keras>=3.15.1,<3.17"'
    )


def test_a_model_that_is_moved_by_a_callback():
    made = lockstep.distribute(model(), 2)
    said = []
    callback = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: said.append(text_of(lockstep.release, made))
    )
    made.fit(*data(), verbose=0, callbacks=[callback])
    assert said == [
        f"release of {made.name!r} was called during its fit, for example by a callback. The "
        "devices of a model\n"
        "cannot change during a call. Call release before or after it."
    ]


def test_a_model_that_two_threads_call():
    made = lockstep.distribute(model(), 2)
    said = []

    def predict(batch, logs):
        thread = threading.Thread(target=lambda: said.append(text_of(made.predict, data()[0])))
        thread.name = "server"
        thread.start()
        thread.join()

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=predict)
    made.fit(*data(7), verbose=0, callbacks=[callback])
    assert said == [
        f"predict of {made.name!r} was called in thread 'server', while another thread runs its "
        "fit.\n"
        "A Keras model can run only one call at a time. Wait for the end of fit, or use a "
        "separate model\n"
        "in the thread (keras.models.clone_model and set_weights)."
    ]


def compiled():
    return model()


def inside(context):
    with context:
        keras.layers.Dense(1)(keras.Input((2,)))


OLD = "tests/files/legacy/keras-2.2.4__mlp4-g2/parallel_full.h5"
NEW = "never-written.keras"
ONE_ARGUMENT = {
    "distribute, model": lockstep.distribute,
    "distribute, devices": lambda value: lockstep.distribute(compiled(), value),
    "distribute, state": lambda value: lockstep.distribute(compiled(), 2, state=value),
    "release": lockstep.release,
    "multi_gpu_model, model": lockstep.multi_gpu_model,
    "multi_gpu_model, gpus": lambda value: lockstep.multi_gpu_model(compiled(), value),
    "sharded": lambda value: inside(lockstep.sharded(value)),
    "rowwise": lockstep.rowwise,
    "on": lambda value: inside(lockstep.on(value)),
    "place, model": lambda value: lockstep.place(value, {"dense*": 0}),
    "place, layers": lambda value: lockstep.place(compiled(), value),
    "place, name": lambda value: lockstep.place(compiled(), {value: 0}),
    "place, device": lambda value: lockstep.place(compiled(), {"dense*": value}),
    "placement": lockstep.placement,
    "verify, model": lambda value: lockstep.verify(value, data(), 2, 1),
    "verify, data": lambda value: lockstep.verify(compiled(), value, 2, 1),
    "verify, devices": lambda value: lockstep.verify(compiled(), data(), value, 1),
    "verify, steps": lambda value: lockstep.verify(compiled(), data(), 2, value),
    "verify, batch_size": lambda value: lockstep.verify(compiled(), data(), 2, 1, batch_size=value),
    "verify, state": lambda value: lockstep.verify(compiled(), data(), 2, 1, state=value),
    "plan, model": lambda value: lockstep.plan(value, devices=2),
    "plan, data": lambda value: lockstep.plan(compiled, value, devices=2),
    "plan, devices": lambda value: lockstep.plan(compiled, devices=value),
    "plan, batch_size": lambda value: lockstep.plan(compiled, devices=2, batch_size=value),
    "plan, memory": lambda value: lockstep.plan(compiled, devices=2, memory=value),
    "plan, gpu": lambda value: lockstep.plan(compiled, devices=2, gpu=value),
    "plan, say": lambda value: lockstep.plan(compiled, devices=2, say=value),
    "bench, model": lambda value: lockstep.bench(value, data(), 2),
    "bench, data": lambda value: lockstep.bench(compiled(), value, 2),
    "bench, devices": lambda value: lockstep.bench(compiled(), data(), value),
    "bench, steps": lambda value: lockstep.bench(compiled(), data(), 2, steps=value),
    "bench, rounds": lambda value: lockstep.bench(compiled(), data(), 2, rounds=value),
    "bench, batch_size": lambda value: lockstep.bench(compiled(), data(), 2, batch_size=value),
    "predict, model": lambda value: lockstep.predict(value, data()[0], "scores.npy"),
    "predict, to": lambda value: lockstep.predict(compiled(), data()[0], value),
    "predict, batch_size": lambda value: lockstep.predict(
        compiled(), data()[0], "scores.npy", batch_size=value
    ),
    "predict, steps": lambda value: lockstep.predict(
        compiled(), data()[0], "scores.npy", steps=value
    ),
    "first_process": lockstep.first_process,
    "inspect": lockstep.inspect,
    "rescue, path": lambda value: lockstep.rescue(value, NEW),
    "rescue, output": lambda value: lockstep.rescue(OLD, value),
    "rescue, model": lambda value: lockstep.rescue(OLD, NEW, model=value),
    "rescue, config": lambda value: lockstep.rescue(OLD, NEW, config=value),
    "rescue, custom_objects": lambda value: lockstep.rescue(OLD, NEW, custom_objects=value),
    "rescue, check": lambda value: lockstep.rescue(OLD, NEW, check=value),
    "load_weights, model": lambda value: lockstep.load_weights(value, OLD),
    "load_weights, path": lambda value: lockstep.load_weights(compiled(), value),
    "rehearse": lockstep.rehearse,
    **{
        f"Checkpoint, {name}": lambda value, name=name: lockstep.Checkpoint(
            **{"directory": "run", name: value}
        )
        for name in ("directory", "every", "steps", "keep", "monitor", "mode", "learning_rate")
    },
    "process_local": lockstep.process_local,
    "split_reading": lockstep.split_reading,
    "Checkpoint, seconds": lambda value: lockstep.Checkpoint("run", seconds=value),
    "Profile, path": lockstep.Profile,
    "Profile, verbose": lambda value: lockstep.Profile(verbose=value),
}
"""Every argument of a public function that is not only true or false, nor Keras's own data."""

MAY_BE = {
    "Checkpoint, directory": [b"x\n"],
    "Checkpoint, seconds": [2.5],
    "Profile, path": [b"x\n"],
    "rowwise": [compiled],
    "process_local": [compiled],
    "plan, model": [compiled],
    "predict, to": [compiled],
    "plan, say": [compiled],
}


@pytest.mark.parametrize("name", ONE_ARGUMENT)
def test_an_argument_of_a_wrong_type_is_refused_in_words(name):
    """`plan(model, 4)` ended in "missing a required argument: 'inputs'"."""
    for value in (2.5, b"x\n", [None], {0.5}, compiled, compiled()):
        if value in MAY_BE.get(name, ()):
            continue
        is_model = isinstance(value, keras.Model)
        takes_model = name in ("release", "placement", "rowwise", "plan, say")
        if is_model and (takes_model or name.endswith("model")):
            continue
        if name == "place, name" and isinstance(value, list | set):  # no key of a dict
            continue
        text_of(ONE_ARGUMENT[name], value)


def test_every_public_function_is_in_that_list():
    taken = {name.partition(",")[0] for name in ONE_ARGUMENT}
    assert taken == {*lockstep.__all__} - {"devices", "errors", "initialize", "is_first"}


def test_a_number_of_devices_may_be_of_numpy():
    assert lockstep.plan(compiled, devices=np.int64(2)).layouts[0].devices == 2
    assert len(lockstep.placement(lockstep.distribute(compiled(), np.int64(2))).devices) == 2
    one, two = keras.Input((2,)), keras.layers.Dense(1, name="second")
    with lockstep.on(np.int64(1)):  # the device of this number
        made = keras.Model(one, two(one))
    assert {device.id for device in made.weights[0].value.devices()} == {1}
