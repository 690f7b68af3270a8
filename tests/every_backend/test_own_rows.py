"""Rows of each process, against stock Keras on one device that is given the joined batches.

One run of several processes does all cases (`tests/processes/own_rows.py`), and each case is a
test here.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest

import lockstep
from lockstep.core.process_local import OwnRandomNumbers
from lockstep.errors import UnusableData
from lockstep.processes.group import current
from lockstep.processes.own_rows import share_of_batch
from lockstep.processes.row_exchange import Counts, Form
from lockstep.processes.split_arrays import read_rows
from lockstep.tools.batches import first_batches
from tests.processes.common import clean_environment
from tests.tiers import further

HERE = Path(__file__).parents[2]
BACKEND = keras.backend.backend()
SEVERAL = BACKEND != "tensorflow"  # which trains in one process

CASES = [
    *("even", "one ends early", "no rows from the start", "the first has no rows"),
    *("tf.data", "DataLoader", "Grain", "generator", "function", "workers", "arrays"),
    *("sample weights", "class weights", "masks and dict inputs", "validation"),
    *("micro-batches", "sharded state", "a stateful RNN", "its own fit"),
    *("several steps at once", "steps_per_epoch", "on_batch", "predict to a function"),
    *("fails in one process", "resumes arrays", "resumes a PyDataset", "resumes tf.data"),
    *("resumes a DataLoader", "resumes split", "resumes where rows stay", "rows stay"),
    *("split reading", "split by workers", "split few rows", "sampler", "stops alone"),
    *("resumes a sampler", "steps of a pass", "plain batches beside"),
    *("plain batch beside", "predict into files", "predict goes on", "global arrays"),
    *("verify", "Ctrl-C in one process", "split arrays", "resumes split arrays"),
    "ends once",
]
QUICK = (
    *("one ends early", "no rows from the start", "arrays", "on_batch", "fails in one process"),
    *("split reading", "plain batch beside", "predict goes on", "ends once"),
)
KILLED = ["killed predict", "killed fit"]
REFUSED = {
    "plain beside": ("ProcessesDisagree", "was given plain data"),
    "plain evaluate": ("ProcessesDisagree", "was given plain data"),
    "y": ("UnusableData", "y was given together with lockstep.process_local(ndarray)"),
    "wrapped one by one": ("UnusableData", "all arrays of a process must be wrapped together"),
    "split": (
        "UnusableData",
        "validation_split was given together with lockstep.process_local(tuple)",
    ),
    "few rows": ("UnusableData", "batch_size=1 was requested, but the global batch"),
    "shapes": ("ProcessesDisagree", "float64[7], float64[2] in process 1, and float64[6], float64"),
    "twice": ("UnusableData", "was given lockstep.process_local(ndarray), but the data of this"),
    "nothing": ("UnusableData", "was given None, but the data of this process were expected"),
    "no rows": ("UnusableData", "have no batch in any process"),
    "text": ("UnusableData", "an array of type <U1"),
    "a number": ("UnusableData", "an array of shape () next to arrays of 2 rows"),
    "repeats": ("UnusableData", "has 31 rows for 4 processes, so it repeats 1 of them"),
    "a class weight": (
        "UnusableData",
        "class_weight was given, but it is not supported for this data",
    ),
    "a split class weight": (
        "UnusableData",
        "class_weight was given, but it is not supported for this data",
    ),
    "other files": ("UnusableData", "the arrays of the processes differ"),
    "other numbers": ("UnusableData", "split_reading was given arrays of [89, 90] rows"),
    "batch beside": ("UnusableData", "together with a ndarray of all rows"),
    "replicated": ("UnusableData", "across all processes is replicated"),
    "columns": ("UnusableData", "is split along a dim other than its rows"),
    "in reverse": ("UnusableData", "has its rows in a different order than the processes"),
    "plain global": ("ProcessesDisagree", "Wrap such arrays in lockstep.process_local"),
    "verify beside": ("ProcessesDisagree", "was given plain data"),
    "bench": ("UnusableData", "bench and plan need the data of all processes"),
    "random rows": ("UnusableData", "a row depends on more than its index"),
    "not by row": ("UnusableData", "split_reading was given a list_iterator"),
    "other order": ("ProcessesDisagree", "draws different rows"),
    "adapt": ("UnusableData", "where plain arrays or batches are expected"),
    "a tuple": ("UnusableData", "A tuple of process_local was given"),
    "batch sizes": ("ProcessesDisagree", "Process 1 was given batch_size=8, but process 0 "),
}


def run(processes, names, folder, *options):
    """Run cases in several processes; what each of them reported, by case, and what was printed."""
    environment = clean_environment()
    environment |= {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE / "src")])}
    script = [str(HERE / "tests" / "processes" / "own_rows.py"), ",".join(names)]
    started = [sys.executable, "-m", "lockstep", "run", "--processes", str(processes), *options]
    done = subprocess.run(
        [*started, *script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    found = {}
    for path in sorted(Path(folder).glob("reports-*.txt")):
        for report in map(json.loads, path.read_text().splitlines()):
            found.setdefault(report.pop("case"), []).append(report)
        path.unlink()
    return found, done.stdout


if BACKEND != "jax":  # which has arrays of all processes
    for name in ("replicated", "columns", "in reverse", "plain global"):
        del REFUSED[name]


@functools.cache
def _all_reports(processes, quick):
    cases = [case for case in _of_backend(CASES) if (case in QUICK) == quick]
    with tempfile.TemporaryDirectory() as folder:
        return run(processes, [*cases, *(REFUSED if quick else ()), "warned"], folder)


def reports(processes, quick, case):
    """What the processes of one run reported of a case. One that fails is the last of its run."""
    found, printed = _all_reports(processes, quick)
    assert case in found, printed[-3000:]
    return found[case]


def _of_backend(cases):
    # Keras on PyTorch refuses several steps in one execution, and its stateful RNNs fail there; a
    # fork of JAX may stand still.
    others = {
        "jax": ["split by workers"],
        "torch": ["several steps at once", "a stateful RNN", "rows stay", "global arrays"],
    }
    return [case for case in cases if case not in others[BACKEND]]


if SEVERAL:
    PROCESSES = pytest.mark.parametrize("processes", [2, *further(3)])

    @PROCESSES
    @pytest.mark.parametrize("case", QUICK)
    def test_the_numbers_are_those_of_one_device(case, processes):
        (report,) = reports(processes, True, case)
        assert report["far"] < 1e-10

    @pytest.mark.thorough
    @pytest.mark.parametrize("processes", [2, 3])
    @pytest.mark.parametrize("case", [case for case in _of_backend(CASES) if case not in QUICK])
    def test_further_numbers_are_those_of_one_device(case, processes):
        (report,) = reports(processes, False, case)
        assert report["far"] < (1e-10 if "resumes" not in case else 1e-300)

    @PROCESSES
    @pytest.mark.parametrize("case", REFUSED)
    def test_what_cannot_be_joined_is_refused_in_every_process(case, processes):
        found = reports(processes, True, case)
        kind, words = REFUSED[case]
        assert len(found) == processes
        for report in found:
            name, said = report["refused"]
            assert name == kind
            assert said.count("\n") <= 2
        assert any(words in report["refused"][1] for report in found)

    @PROCESSES
    def test_the_same_rows_in_two_processes_are_a_warning(processes):
        (report,) = reports(processes, True, "warned")
        assert any("begin with the same" in said for said in report["warned"])

    @pytest.mark.thorough
    @pytest.mark.parametrize("processes", [1, 3])
    def test_another_number_of_processes_goes_on_at_an_epoch(processes, tmp_path):
        run(2, ["fails on two"], tmp_path)
        found, printed = run(processes, ["goes on"], tmp_path)
        assert "goes on" in found, printed[-3000:]
        assert found["goes on"][0]["far"] < 1e-10

    @pytest.mark.thorough
    def test_another_number_of_processes_predicts_anew(tmp_path):
        run(2, ["leaves files"], tmp_path)
        found, printed = run(3, ["predict anew"], tmp_path)
        assert "predict anew" in found, printed[-3000:]
        assert found["predict anew"][0]["far"] < 1e-10
        names = sorted(each.name for each in tmp_path.glob("anew*"))
        left = [f"anew-0000{rank}-of-00002.npy.partial" for rank in (0, 1)]
        assert names == sorted([*left, *(f"anew-0000{rank}-of-00003.npy" for rank in range(3))])

    @pytest.mark.thorough
    @pytest.mark.parametrize("case", KILLED)
    def test_a_process_is_killed_and_all_go_on(case, tmp_path):
        found, printed = run(2, [case], tmp_path, "--restarts", "1")
        assert case in found, printed[-3000:]
        assert found[case][0]["far"] < 1e-10
        assert "restart 1 of 1" in printed
        assert not [*tmp_path.glob("*.partial")]


if BACKEND == "jax":  # on PyTorch a process has one device

    @pytest.mark.thorough
    def test_arrays_of_all_processes_lie_on_several_devices_of_each(tmp_path):
        given = ("--devices-per-process", "2")
        found, printed = run(2, ["global arrays", "predict into files"], tmp_path, *given)
        assert "predict into files" in found, printed[-3000:]
        assert max(found[case][0]["far"] for case in found) < 1e-10


def made():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


X, Y = np.arange(30.0).reshape(10, 3) / 30, np.arange(10.0).reshape(10, 1) / 10


def batches():
    yield from ((X[row : row + 4], Y[row : row + 4]) for row in range(0, 10, 4))


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[4 * index :][:4], Y[4 * index :][:4]


@pytest.mark.parametrize("kind", ["arrays", "generator", "function", "PyDataset"])
def test_one_process_takes_it_as_plain_data(kind, recwarn):
    own, plain = {
        "arrays": ((X, Y), (X, Y)),
        "generator": (batches(), (Sequence(),)),
        "function": (batches, (Sequence(),)),
        "PyDataset": (Sequence(), (Sequence(),)),
    }[kind]
    own, given = lockstep.process_local(own), {"shuffle": False, "verbose": 0, "batch_size": 4}
    one, other = made(), lockstep.distribute(made(), 2)
    wanted = one.fit(*plain, **given).history
    found = other.fit(own, **given).history
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-5)
    if kind != "generator":
        other.fit(own, **given, epochs=2)
        one.fit(*plain, **given, epochs=2)
    for a, b in zip(other.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    if kind == "arrays":
        loss = other.evaluate(own, verbose=0)
        np.testing.assert_allclose(loss, one.evaluate(X, Y, verbose=0), rtol=1e-5)
        mine = other.predict_on_batch(lockstep.process_local(X))
        np.testing.assert_allclose(mine, one.predict_on_batch(X), rtol=1e-5)


@pytest.mark.parametrize("data", [(X, Y), Sequence(), batches])
def test_tools_take_it_as_plain_data_in_one_process(data):
    found = first_batches(lockstep.process_local(data), 2, 4 if isinstance(data, tuple) else None)
    for (x, y), rows in zip(found, (slice(0, 4), slice(4, 8)), strict=True):
        np.testing.assert_array_equal(x.astype("float32"), X[rows].astype("float32"))
        np.testing.assert_array_equal(y.astype("float32"), Y[rows].astype("float32"))


def test_y_beside_it_is_refused_in_one_process():
    model = lockstep.distribute(made(), 2)
    with pytest.raises(
        UnusableData, match=r"y was given together with lockstep\.process_local\(ndarray"
    ):
        model.fit(lockstep.process_local(X), Y, verbose=0)


SAME = iter([(X, Y)] * 3)


@pytest.mark.parametrize(
    ("makes", "said"),
    [
        (lambda: None, "a function that returned None"),
        (lambda: (X, Y), "data that yield a ndarray, but tuples were expected"),
        (lambda: SAME, "returned the same list_iterator twice"),
    ],
)
def test_a_function_without_batches_of_a_pass_is_refused(makes, said):
    model = lockstep.distribute(made(), 2)
    with pytest.raises(UnusableData, match=said) as caught:
        model.fit(lockstep.process_local(makes), epochs=3, verbose=0)
    assert str(caught.value).count("\n") <= 2


def test_a_function_may_return_the_same_list(recwarn):
    one, other = made(), lockstep.distribute(made(), 2)
    one.fit(Sequence(), epochs=2, shuffle=False, verbose=0)
    every = list(batches())
    other.fit(lockstep.process_local(lambda: every), epochs=2, verbose=0)
    for a, b in zip(other.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_a_pass_without_a_batch_is_a_warning():
    passes = iter([list(batches()), list(batches()), []])
    model = lockstep.distribute(made(), 2)
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(lockstep.process_local(lambda: next(passes)), epochs=2, verbose=0)


@pytest.mark.parametrize("data", [iter([(X, Y)]), zip(X, Y, strict=True)])
def test_an_iterator_that_is_no_generator_is_refused(data):
    with pytest.raises(UnusableData, match=f"a {type(data).__name__}, an iterator that is not a"):
        lockstep.process_local(data)


@pytest.mark.parametrize(("batch_size", "size"), [(7, 3), (8, 2), (3, 3), (100, 7)])
def test_shares_of_a_batch_are_the_whole(batch_size, size):
    shares = [share_of_batch(batch_size, rank, size) for rank in range(size)]
    assert sum(shares) == batch_size
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


def test_the_form_of_a_batch_travels_as_text():
    batch = ({"b": X, "a": [X.astype("int8"), None]}, Y[:, 0])
    form, arrays = Form.of(batch)
    again = Form.from_text(form.as_text())
    assert again == form
    assert [array.dtype.name for array in arrays] == ["float64", "int8", "float64"]
    packed = np.concatenate([array.reshape(-1).view("uint8") for array in arrays])
    assert form.bytes_of(10) == len(packed)
    back = again.batch(again.rows_in(packed, 10))
    assert back[0]["a"][1] is None
    for one, other in zip(keras.tree.flatten(back), keras.tree.flatten(batch), strict=True):
        assert one is other is None or (one == other).all()


def test_bytes_travel_in_the_order_of_the_machine():
    form, (array,) = Form.of(X.astype(">f8"))
    packed = np.ascontiguousarray(array).reshape(-1).view("uint8")
    (back,) = form.rows_in(packed, len(X))
    np.testing.assert_array_equal(back, X)


@pytest.mark.parametrize("rows", [[4, 5, 6], [6, 4, 5], [9, 0, 3], [7]])
def test_rows_of_a_file_are_read_in_any_order(rows, tmp_path):
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"], file["y"] = X.astype("float16"), np.arange(10)
        x, y = (read_rows(file[name], np.array(rows)) for name in "xy")
    np.testing.assert_array_equal(x, X.astype("float16").astype(keras.config.floatx())[rows])
    assert x.dtype == keras.config.floatx()
    np.testing.assert_array_equal(y, rows)


def test_rows_of_a_process_are_a_slice():
    assert current().rank == 0
    counts = Counts((3, 0, 4))
    assert (counts.total, counts.mine) == (7, slice(0, 3))


def test_data_draw_random_numbers_of_their_own():
    np.random.seed(3)
    wanted = np.random.rand(4)
    np.random.seed(3)
    own = OwnRandomNumbers()
    np.random.seed(9)
    of_process = np.random.rand(2)
    np.random.seed(9)
    found = []
    for _ in range(2):
        with own.drawn():
            found += np.random.rand(2).tolist()
    assert found == wanted.tolist()
    assert np.random.rand(2).tolist() == of_process.tolist()
