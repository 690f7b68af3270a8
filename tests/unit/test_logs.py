"""Logs that stay on the device until somebody looks at a value."""

import copy
import json
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
from keras.src.utils import python_utils

from lockstep.training.logs import LazyLogs, lazy_logs, pythonify_logs

NUMBERS = {"acc": 0.5, "loss": 2.25}


class Count:
    """The way to numbers, counted."""

    def __init__(self):
        self.calls = 0

    def __call__(self, logs):
        self.calls += 1
        return pythonify_logs(logs)


@pytest.fixture
def numbers():
    return Count()


@pytest.fixture
def logs(numbers):
    return of_two(numbers)


def of_two(numbers):
    return lazy_logs({"loss": jnp.float32(2.25), "acc": jnp.float32(0.5)}, numbers)


NAMES = [
    list,
    len,
    bool,
    lambda logs: "loss" in logs,
    lambda logs: isinstance(logs, dict),
    lambda logs: logs or {},
    lambda logs: [*logs.keys()],
]


def test_names_are_known_without_a_value():
    for look in NAMES:
        logs = of_two(numbers := Count())
        assert look(logs), look
        assert list(logs) == ["acc", "loss"]
        assert numbers.calls == 0, look


WAYS = [
    dict,
    lambda logs: {**logs},
    lambda logs: {} | logs,
    lambda logs: logs | {},
    lambda logs: logs.copy(),
    copy.copy,
    copy.deepcopy,
    lambda logs: pickle.loads(pickle.dumps(logs)),
    lambda logs: json.loads(json.dumps(logs)),
    lambda logs: dict(logs.items()),
    lambda logs: dict(zip(logs, logs.values(), strict=True)),
    lambda logs: {name: logs[name] for name in logs},
    lambda logs: {name: logs.get(name) for name in logs},
    lambda logs: {name: logs.pop(name) for name in ["acc", "loss"]},
    lambda logs: {name: logs.setdefault(name, None) for name in logs},
    lambda logs: dict(reversed([logs.popitem(), logs.popitem()])),
    lambda logs: (lambda **kwargs: kwargs)(**logs),
    lambda logs: eval(repr(logs)),
    lambda logs: eval(str(logs)),
    lambda logs: eval(f"{logs}"),
    lambda logs: eval("{{'acc': {acc!r}, 'loss': {loss!r}}}".format(**logs)),
    lambda logs: eval("{'acc': %(acc)r, 'loss': %(loss)r}" % logs),  # noqa: UP031
    lambda logs: (empty := {}, empty.update(logs))[0],
]


def test_every_way_to_a_value_sees_plain_numbers():
    for look in WAYS:
        found = look(of_two(numbers := Count()))
        assert type(found) is dict
        assert found == NUMBERS, look
        assert list(found) == ["acc", "loss"], look
        assert {type(value) for value in found.values()} == {float}
        assert numbers.calls == 1, look


def test_equal_to_a_plain_dict_from_both_sides(logs):
    assert logs == NUMBERS
    assert dict(NUMBERS) == logs
    assert logs != {"loss": 2.25}


def test_a_callback_may_add_and_remove(logs):
    logs["lr"] = 0.1
    del logs["acc"]
    logs |= {"more": 1}
    assert logs == {"loss": 2.25, "lr": 0.1, "more": 1}
    logs.clear()
    assert dict(logs) == {}


def test_values_are_fetched_once(logs, numbers):
    assert logs["loss"] == logs.get("loss") == dict(logs)["loss"] == 2.25
    assert numbers.calls == 1


def test_nested_logs_are_flat_as_keras_makes_them():
    nested = {"b": {"z": jnp.float32(1), "a": jnp.float32(2)}, "a": jnp.float32(3), "c": "words"}
    keras_has = python_utils.pythonify_logs(nested)
    for logs in (pythonify_logs(nested), lazy_logs(nested, pythonify_logs)):
        assert list(logs.items()) == list(keras_has.items())


def test_arrays_stay_arrays():
    logs = lazy_logs({"outputs": jnp.arange(3.0)}, pythonify_logs)
    assert isinstance(logs, LazyLogs)
    assert type(logs["outputs"]) is np.ndarray


def test_what_is_no_array_is_a_plain_dict_at_once():
    for logs in (None, {}, {"n": 3}, {"outputs": [jnp.ones(2)]}):
        assert type(lazy_logs(logs, pythonify_logs)) is dict
