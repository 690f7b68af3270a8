"""What is said of a version of a framework that was never tried, and what is refused."""

import keras
import pytest
from keras import layers

import lockstep
from lockstep.core import tried_versions
from lockstep.core.tried_versions import TRIED, check_oldest, mixed_tensorflow, untried
from lockstep.distribute import _say_untried
from lockstep.errors import UnsupportedFramework
from lockstep.tools.doctor import Findings


@pytest.mark.parametrize("version", ["0.12.0.1", "0.12.0", "0.7.2", "0.10.2"])
def test_of_a_version_that_was_tried_nothing_is_said(version):
    assert untried("jax", version) is None
    check_oldest("jax", version)


@pytest.mark.parametrize("version", ["0.12.1", "0.12.0.2", "0.13.0.dev20261201", "1.0"])
def test_a_newer_one_is_named_with_the_newest_that_was_tried(version):
    assert untried("jax", version) == (
        f"jax {version} is newer than the versions lockstep was tested with (up to "
        f"{TRIED['jax'].newest}); lockstep verify checks your model"
    )


def test_a_build_of_a_tried_version_is_that_version():
    assert untried("torch", f"{TRIED['torch'].newest}+cu132") is None
    assert untried("numpy", "99.0") is None


@pytest.mark.parametrize(("framework", "version"), [("jax", "0.6.2"), ("torch", "2.5.1+cu118")])
def test_an_older_one_is_refused_with_the_command_that_mends_it(framework, version):
    oldest = TRIED[framework].oldest
    with pytest.raises(UnsupportedFramework) as raised:
        check_oldest(framework, version)
    first, _, last = str(raised.value).splitlines()
    assert first == f"{framework} {version} is installed, but lockstep needs {framework}>={oldest}:"
    assert last == f'Run pip install --upgrade "{framework}>={oldest}"'


@pytest.mark.parametrize(
    ("installed", "mixed"),
    [
        ({"tensorflow": "2.21.0"}, False),
        ({"tensorflow": "2.21.0", "tensorflow-cpu": "2.21.0"}, False),
        ({"tensorflow": "2.20.0", "tensorflow-cpu": "2.21.0"}, True),
    ],
)
def test_two_packages_of_tensorflow_are_refused(installed, mixed, monkeypatch):
    monkeypatch.setattr(tried_versions, "package_version", installed.get)
    assert (mixed_tensorflow() is not None) is mixed
    if mixed:
        with pytest.raises(UnsupportedFramework, match=r"tensorflow 2\.20\.0 and tensorflow-cpu 2"):
            tried_versions.check_one_tensorflow()


def test_the_first_distribute_prints_the_line_and_a_second_does_not(monkeypatch, capsys):
    import jax

    monkeypatch.setattr(jax, "__version__", "98.0")
    _say_untried.cache_clear()
    for _ in range(2):
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        lockstep.distribute(model, 1)
    assert capsys.readouterr().out == f"lockstep: {untried('jax', '98.0')}\n"


def test_doctor_says_it_too():
    devices = (("cpu:0", "cpu"), ("cpu:1", "cpu"))
    found = Findings("jax", "the default", {"jax": "98.0", "jaxlib": "98.0"}, devices)
    assert found.advice() == f"Nothing to change.\n{untried('jax', '98.0')}"
    known = Findings("jax", "the default", {"jax": "0.10.2"}, devices)
    assert known.advice() == "Nothing to change."
