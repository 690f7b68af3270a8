"""Finds a `tf.data` shuffle without a seed: no later run draws its order again."""

from typing import Any

from lockstep.keras_compat import TFDatasetAdapter


def unseeded_shuffle(adapter: Any) -> str | None:
    """Return a warning if the data is shuffled by `tf.data` without a seed, else `None`.

    A resumed run is refused then, which the user would otherwise learn after a crash.

    Args:
        adapter: Keras's adapter of the training data.
    """
    if not isinstance(adapter, TFDatasetAdapter):
        return None
    left = [adapter.get_tf_dataset()]
    while left:
        dataset = left.pop()
        # tensorflow/python/data/ops: _ShuffleDataset._seed and _seed2, both 0 without a seed, and
        # DatasetV2._inputs. A TensorFlow without these names gives no warning.
        seeds: list[Any] = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
        if None not in seeds and not any(int(seed) for seed in seeds):
            return (
                "The tf.data.Dataset is shuffled without a seed: a run that is started again draws "
                "another order,\nand its checkpoints are refused then. Give a seed, such as "
                "shuffle(1000, seed=0), or call\nkeras.utils.set_random_seed before the data is "
                "made."
            )
        left += getattr(dataset, "_inputs", list)()
    return None
