"""`lockstep.Profile`: the numbers are those without it, and the parts of the time are right."""

import json
import re

import keras
import numpy as np
import pytest

import lockstep
from lockstep.core.engine import TRAIN
from lockstep.errors import LockstepWarning, ProfileError, UnsupportedModel
from lockstep.training import fit_clock, profile
from lockstep.training.profile_report import PARTS
from tests.conformance.common import data, fit, model
from tests.tables import Table
from tests.tiers import rest

BACKEND = keras.backend.backend()
TOLD = [part for part in PARTS if part != "other"]


def distributed(devices=1, **options):
    return lockstep.distribute(model(**options), devices)


def weights(made):
    return [keras.ops.convert_to_numpy(variable.value) for variable in made.weights]


def quiet(**options):
    return lockstep.Profile(verbose=0, **options)


class Time:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def time(monkeypatch):
    """The time of the clock: only the code of a test takes any."""
    made = Time()
    monkeypatch.setattr(fit_clock, "now", made)
    return made


class Batches(keras.utils.PyDataset):
    """Five batches that take a time each."""

    def __init__(self, time, seconds):
        super().__init__()
        self.time, self.seconds = time, seconds

    def __len__(self):
        return 5

    def __getitem__(self, number):
        self.time.now += self.seconds
        x, y = data()
        return x[number * 7 : number * 7 + 7], y[number * 7 : number * 7 + 7]


class Slow(keras.callbacks.Callback):
    """Takes a time at each of some hooks."""

    def __init__(self, time, **seconds):
        super().__init__()
        self.time, self.seconds = time, seconds

    def on_train_begin(self, logs=None):
        self.time.now += self.seconds.get("begin", 0.0)

    def on_train_batch_end(self, batch, logs=None):
        assert logs["loss"] > 0
        self.time.now += self.seconds.get("batch", 0.0)

    def on_epoch_end(self, epoch, logs=None):
        self.time.now += self.seconds.get("epoch", 0.0)

    def on_test_batch_end(self, batch, logs=None):
        self.time.now += self.seconds.get("test", 0.0)

    def on_train_end(self, logs=None):
        self.time.now += self.seconds.get("end", 0.0)


class SlowOnes(Slow):
    pass


def adds_up(report, recorded=False):
    """A checkpoint records the batches, which are then drawn in Python on TensorFlow too."""
    parts = [getattr(report, part) for part in PARTS]
    assert sum(part or 0.0 for part in parts) == pytest.approx(report.wall)
    assert all(part is None or part >= -1e-9 for part in parts)
    assert (report.input is None) == (BACKEND == "tensorflow" and not recorded)
    assert sum(report.by_callback.values()) == pytest.approx(report.callbacks)


CASES = Table(
    {
        "arrays": {"epochs": 3, "shuffle": True, "validation_split": 0.3},
        "a callback": {"epochs": 2, "callbacks": [keras.callbacks.TerminateOnNaN]},
        "steps of an epoch": {"epochs": 3, "steps_per_epoch": 2},
    }
)


@pytest.mark.parametrize("devices", [2, *rest(1)])
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_without_it_bit_for_bit(case, devices):
    found = []
    for profiles in ([], [quiet()]):
        options = dict(CASES[case])
        callbacks = [made() for made in options.pop("callbacks", [])]
        made = distributed(devices)
        history = fit(made, callbacks=callbacks + profiles, **options)
        draw = keras.random.uniform((3,))
        found.append((history, weights(made), keras.ops.convert_to_numpy(draw)))
        lockstep.release(made)
    (history, before, draw), (mine, after, drawn) = found
    assert mine == history
    np.testing.assert_array_equal(draw, drawn)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    adds_up(profiles[0].report)
    assert profiles[0].report.wall > 0


HOOKS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]


class Notes(keras.callbacks.Callback):
    """Notes each hook, its arguments and the values of its logs."""

    def __init__(self):
        super().__init__()
        self.seen = []


def _noting(hook):
    def note(self, *args, **kwargs):
        *where, logs = [*args, *kwargs.values()]
        self.seen.append((hook, *where, None if logs is None else dict(logs)))

    return note


for _hook in HOOKS:
    setattr(Notes, _hook, _noting(_hook))


def test_every_callback_is_called_as_without_it():
    seen = []
    for profiles in ([], [quiet()]):
        notes = Notes()
        options = {"epochs": 2, "validation_data": data(14), "validation_batch_size": 7}
        fit(distributed(), callbacks=[notes, *profiles], **options)
        seen.append(notes.seen)
    assert seen[0] == seen[1]
    assert {each[0] for each in seen[0]} >= {"on_train_begin", "on_test_batch_end", "on_train_end"}


def test_each_part_has_its_time(time):
    told = quiet()
    callbacks = [Slow(time, batch=1.0, epoch=20.0), SlowOnes(time, begin=2.0, end=3.0, test=0.5)]
    distributed().fit(
        Batches(time, 0.25),
        epochs=2,
        verbose=0,
        shuffle=False,
        callbacks=[*callbacks, told],
        validation_data=data(14),
        validation_batch_size=7,
    )
    report = told.report
    adds_up(report)
    assert report.by_callback["Slow"] == 2 * (5 * 1.0 + 20.0)
    assert report.by_callback["SlowOnes"] == 2.0 + 3.0 + 2 * 2 * 0.5
    assert list(report.by_callback)[:2] == ["Slow", "SlowOnes"]
    assert report.checkpoint == 0.0
    assert report.validation == 0.0
    if BACKEND != "tensorflow":  # whose own threads draw
        assert 2 * 5 * 0.25 <= report.input < 2 * 7 * 0.25
        assert report.steps == report.compile == 0.0
    assert report.taken == 10
    assert (report.data, report.workers, report.ended_by) == ("PyDataset", 1, None)


def test_validation_has_its_time(time):
    held_out, told = Batches(time, 2.0), quiet()
    fit(distributed(), epochs=3, callbacks=[told], validation_data=held_out, validation_freq=2)
    adds_up(told.report)
    if BACKEND == "tensorflow":
        assert told.report.validation > 0
    else:
        assert 5 * 2.0 <= told.report.validation <= 7 * 2.0
        assert told.report.input == told.report.steps == 0.0


def test_a_checkpoint_is_counted_apart(time, monkeypatch, tmp_path):
    written = lockstep.Checkpoint.on_epoch_end

    def slow(self, epoch, logs=None):
        time.now += 6.0
        written(self, epoch, logs)

    monkeypatch.setattr(lockstep.Checkpoint, "on_epoch_end", slow)
    told, run = quiet(), tmp_path / "run"
    fit(distributed(), epochs=2, callbacks=[told, lockstep.Checkpoint(run)])
    adds_up(told.report, recorded=True)
    assert told.report.checkpoint == 2 * 6.0
    assert told.report.callbacks == 0.0
    assert "save less often" in told.report.advice
    # It is no callback whose state a run has: the next fit resumes without a remark.
    history = fit(distributed(), epochs=3, callbacks=[lockstep.Checkpoint(run)])
    assert len(history["loss"]) == 3


def test_the_first_execution_counts_as_compiling(time, monkeypatch):
    made, told = distributed(), quiet()
    session = made._lockstep.session
    if session.first_work(TRAIN, 0) is None:
        pytest.skip("nothing is compiled")
    run, epoch = [], session.epoch

    class Epoch:
        def __init__(self, *args):
            self.context = epoch(*args)

        def __enter__(self):
            execute = self.context.__enter__()

            def slow(iterator, times):
                time.now += 3.0 if run else 50.0
                run.append(times)
                return execute(iterator, times)

            return slow

        def __exit__(self, *error):
            return self.context.__exit__(*error)

    monkeypatch.setattr(session, "epoch", Epoch)
    fit(made, epochs=2, callbacks=[told])
    adds_up(told.report)
    assert len(run) == 16
    assert told.report.compile == 47.0
    assert told.report.steps == 16 * 3.0
    assert told.report.step == 3.0


def test_one_line_and_one_advice_are_printed(time, capsys):
    fit(distributed(), epochs=2, verbose=2, callbacks=[Slow(time, epoch=4.0), lockstep.Profile()])
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert re.fullmatch(
        r"lockstep: of 8.00 s: steps .*0.00, callbacks 8.00 \(Slow 8.00\)", lines[0]
    )
    assert lines[1] == "Try to let Slow save or log less often: at best 0.00 s."
    fit(distributed(), verbose=0, callbacks=[quiet()])
    assert capsys.readouterr().out == ""


def test_the_file_has_the_report(tmp_path, time):
    path = tmp_path / "profile.json"
    told = quiet(path=path)
    fit(distributed(), callbacks=[told, Slow(time, epoch=1.5)])
    written = json.loads(path.read_text())
    assert written == told.report.as_dict()
    assert {"wall", *PARTS, "by_callback", "verdict", "advice"} <= written.keys()
    assert written["by_callback"]["Slow"] == 1.5
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


def test_a_file_that_cannot_be_written_loses_no_fit(tmp_path, monkeypatch):
    def fails(path):
        raise OSError("No space left on device")

    monkeypatch.setattr(profile, "replacing", fails)
    told = quiet(path=tmp_path / "profile.json")
    with pytest.warns(LockstepWarning, match="was not written to .*: No space left"):
        assert fit(distributed(), callbacks=[told])["loss"]
    assert told.report is not None


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_an_error_passes_and_the_report_of_what_ran_is_kept(error, time, tmp_path, capsys):
    class Fails(Slow):
        def on_train_batch_end(self, batch, logs=None):
            self.time.now += 1.0
            if batch == 2:
                raise error

    told = lockstep.Profile(tmp_path / "profile.json")
    with pytest.raises(type(error)):
        fit(distributed(), callbacks=[told, Fails(time)])
    adds_up(told.report)
    assert told.report.by_callback["Fails"] == 3.0
    assert told.report.taken == 3
    name = type(error).__name__
    assert f"lockstep: of 3.00 s until {name}: " in capsys.readouterr().out
    assert json.loads((tmp_path / "profile.json").read_text())["ended_by"] == name


def test_an_error_before_the_first_step_leaves_no_report(capsys):
    class Fails(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            raise ValueError("no")

    told = lockstep.Profile()
    with pytest.raises(ValueError, match="no"):
        fit(distributed(), callbacks=[told, Fails()])
    assert told.report is None
    assert capsys.readouterr().out == ""
    fit(distributed(), callbacks=[told])
    assert told.report is not None


def refused(error, callbacks, made=None, **options):
    made = distributed() if made is None else made
    before = weights(made)
    with pytest.raises(error) as raised:
        fit(made, callbacks=callbacks, **options)
    for one, other in zip(before, weights(made), strict=True):
        np.testing.assert_array_equal(one, other)
    assert str(raised.value).count("\n") < 3
    return str(raised.value)


def test_bad_input_is_refused_before_the_first_step(tmp_path):
    assert "2 profiles were given to one fit, but one" in refused(ProfileError, [quiet(), quiet()])
    words = refused(ProfileError, [quiet(path=tmp_path / "no" / "profile.json")])
    assert "no/profile.json' was requested, but there is no folder" in words
    words = refused(ProfileError, keras.callbacks.CallbackList([quiet()], model=model()))
    assert "a plain list" in words
    words = refused(UnsupportedModel, [quiet()], made=model())
    assert "lockstep.distribute(model, devices=1)" in words
    with pytest.raises(ProfileError, match="path=7 was given, but a path was expected"):
        quiet(path=7)
    with pytest.raises(ProfileError, match="verbose='no' was requested"):
        lockstep.Profile(verbose="no")


class Own(keras.Sequential):
    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)


class Loops(keras.Sequential):
    def fit(self, *args, callbacks=(), **kwargs):
        for callback in callbacks:
            callback.on_train_begin()


def test_a_fit_of_your_own_is_seen_if_it_calls_that_of_keras():
    made = Own([keras.Input((4,)), keras.layers.Dense(2)])
    made.compile("sgd", "mse")
    lockstep.distribute(made, 1)
    told = quiet()
    fit(made, epochs=2, callbacks=[told])
    adds_up(told.report)
    assert told.report.taken == 16
    made = Loops([keras.Input((4,)), keras.layers.Dense(2)])
    made.compile("sgd", "mse")
    with pytest.raises(UnsupportedModel, match=r"call super\(\)\.fit"):
        lockstep.distribute(made, 1).fit(*data(), callbacks=[told])


def test_evaluate_and_predict_alone_do_nothing(capsys):
    made, told = distributed(), lockstep.Profile()
    made.evaluate(*data(), verbose=0, callbacks=[told])
    made.predict(data()[0], verbose=0, callbacks=[told])
    assert told.report is None
    assert capsys.readouterr().out == ""


def test_a_second_fit_is_a_second_report():
    made, told = distributed(), quiet()
    fit(made, epochs=2, callbacks=[told])
    first = told.report
    fit(made, epochs=1, callbacks=[told])
    assert (first.taken, told.report.taken) == (16, 8)
    adds_up(told.report)


def generated():
    x, y = data()
    for first in range(0, len(x), 7):
        yield x[first : first + 7], y[first : first + 7]


@pytest.mark.skipif(BACKEND == "torch", reason="Keras has one step in each execution")
def test_steps_of_an_execution_are_counted_as_they_are():
    made, told = lockstep.distribute(model(compiled=False), 1), quiet()
    made.compile("sgd", "mse", steps_per_execution=3)
    fit(made, epochs=2, callbacks=[told])  # of 8 steps
    assert (told.report.taken, told.report.steps_per_execution) == (16, 3)


def test_the_kind_of_data_is_known():
    for given, kind in ((data(), "arrays"), ((generated(),), "generator")):
        told, options = quiet(), {"shuffle": False, "steps_per_epoch": 5, "batch_size": None}
        distributed().fit(*given, verbose=0, callbacks=[told], **options)
        assert told.report.data == kind
        adds_up(told.report)
