"""A run that was cut anywhere and goes on ends as one that was not cut."""

import contextlib
import gc
import itertools
import tempfile
import warnings
from functools import cache

import keras
import pytest

import lockstep
from lockstep.errors import CheckpointWarning
from tests.checkpoints.data import BATCH, ROWS, SOURCES
from tests.checkpoints.runs import EPOCHS, STEPS, assert_same_end, train
from tests.conformance import common

KNOWN = "Your input ran out of data"  # of data that does not say its length, as without a cut


@contextlib.contextmanager
def costly_skipping_is_said(name):
    if name == "generator":
        with pytest.warns(CheckpointWarning, match="drawn again"):
            yield
    else:
        yield


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=KNOWN)
        yield
    gc.collect()  # the threads of Grain end with its iterators


@cache
def truth_of(name):
    """What a run leaves that is not cut, and has no checkpoint.

    Where a PyDataset has workers, Keras alone begins with batches that they had made ready for
    its look at the first one, in an order of chance; with a checkpoint these are left out.
    """
    if name != "py_dataset_with_workers":
        return train(SOURCES[name])
    with tempfile.TemporaryDirectory() as folder:
        return train(SOURCES[name], folder)


WHOLE = pytest.mark.whole
SAMPLE = ["arrays", "py_dataset", "tf_data", "torch_loader", "grain_dataset", "generator"]
BETWEEN = ["py_dataset_with_state", "tf_data"]


def cases():
    """Every kind of data, cut in three places; the fixed sample has some kinds, cut in one."""
    for name in SOURCES:
        for cut in (10, 3, 7, 11):
            sampled = cut == 10 and name in SAMPLE
            yield pytest.param(name, cut, marks=[] if sampled else WHOLE)


@pytest.mark.parametrize(("name", "cut"), list(cases()))
def test_every_kind_of_data_goes_on_where_it_was(name, cut, tmp_path):
    train(SOURCES[name], tmp_path, cut=cut, checkpoint={"steps": 1, "background": False})
    with costly_skipping_is_said(name):
        assert_same_end(train(SOURCES[name], tmp_path), truth_of(name))


@pytest.mark.parametrize(
    "name", [n if n in BETWEEN else pytest.param(n, marks=WHOLE) for n in SOURCES]
)
def test_every_kind_of_data_goes_on_between_two_epochs(name, tmp_path):
    train(SOURCES[name], tmp_path, epochs=2, checkpoint={})
    with costly_skipping_is_said(name):
        assert_same_end(train(SOURCES[name], tmp_path, checkpoint={}), truth_of(name))


class Counting:
    """Rows for Grain, which counts how often one is asked for."""

    def __init__(self):
        self.x, self.y = common.data(ROWS)
        self.asked = 0

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        self.asked += 1
        return self.x[row], self.y[row]


def test_grain_goes_on_without_the_rows_before(tmp_path):
    import grain

    asked = []
    for cut in (EPOCHS * STEPS - 6, EPOCHS * STEPS - 1):  # in the last epoch: early, and late
        rows = Counting()

        def source(rows=rows):
            options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
            return {"x": grain.MapDataset.source(rows).batch(BATCH).to_iter_dataset(options)}

        folder = tmp_path / str(cut)
        train(source, folder, cut=cut, checkpoint={"steps": 1, "background": False})
        before, rows.asked = rows.asked, 0
        assert_same_end(train(source, folder), train(source))
        asked.append(rows.asked)
        assert before
    assert asked[0] - asked[1] == 5 * BATCH


def test_grain_draws_its_batches_again_where_its_state_does_not_fit(tmp_path):
    """Its `DataLoader` compares what `repr` returns, and an object without one has an address."""
    import grain
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    numbers = itertools.count()

    class Anew(Counting):
        def __init__(self):
            super().__init__()
            self.number = next(numbers)

        def __repr__(self):
            return f"<Anew object at {self.number:#x}>"

    def source():
        sampler = grain.samplers.IndexSampler(ROWS, shuffle=True, seed=3, num_epochs=1)
        batches = [grain.transforms.Batch(BATCH)]
        return {"x": grain.DataLoader(data_source=Anew(), sampler=sampler, operations=batches)}

    train(source, tmp_path, cut=STEPS + 3, checkpoint={"steps": 1, "background": False})
    with pytest.warns(
        CheckpointWarning, match=r"2 batches of Grain are produced again .*\n.* `__r"
    ):
        assert_same_end(train(source, tmp_path), train(source))


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("times", [2, 4])
def test_grain_goes_on_after_an_epoch_whose_last_execution_was_not_full(times, tmp_path):
    """The state of the data was taken once more where there was no batch."""
    rows = common.data(7 * BATCH)

    class Ends(keras.callbacks.Callback):
        at = None

        def on_epoch_end(self, epoch, logs=None):
            if epoch == self.at:
                raise KeyboardInterrupt

        def get_state(self):
            return {}

        def set_state(self, state):
            pass

    def fit(folder):
        import grain

        keras.utils.set_random_seed(1)
        made = lockstep.distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]), 2)
        made.compile(keras.optimizers.SGD(0.05), "mse", steps_per_execution=times)
        data = grain.MapDataset.source([*zip(*rows, strict=True)]).to_iter_dataset().batch(BATCH)
        saving = lockstep.Checkpoint(folder, steps=1)
        made.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=[saving, Ends()])
        return made.get_weights()

    Ends.at = 0
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run")
    Ends.at = None
    common.assert_same(fit(tmp_path / "run"), fit(tmp_path / "whole"), atol=0)


def test_a_normalization_that_was_not_adapted_again_computes_with_the_statistics_of_the_run(
    tmp_path,
):
    x, y = common.data(26)
    x = x * 3 + 5

    def made(rows):
        keras.utils.set_random_seed(1)
        normal = keras.layers.Normalization()
        normal.adapt(rows)
        model = keras.Sequential([keras.Input((4,)), normal, keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return lockstep.distribute(model, 4)

    def fit(model, epochs, folder):
        saving = [lockstep.Checkpoint(folder)]
        return model.fit(x, y, epochs=epochs, verbose=0, shuffle=False, callbacks=saving).history

    truth = made(x)
    losses = fit(truth, 3, tmp_path / "whole")["loss"]
    fit(made(x), 1, tmp_path / "run")
    other = made(x * 2)
    assert fit(other, 3, tmp_path / "run")["loss"] == losses
    assert (other.predict(x, verbose=0) == truth.predict(x, verbose=0)).all()
