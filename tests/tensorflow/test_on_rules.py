"""What the rules of `keras.ops` say of a function is what its numbers say."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from lockstep.engines.rowwise import RULES, function_refused
from lockstep.engines.tensorflow.steps.scratch_graph import ScratchGraph

ROWS = 6
KERNEL = np.random.default_rng(1).normal(size=(4, 3)).astype("float32")
AS_MANY_AS_ROWS = np.random.default_rng(2).normal(size=(ROWS, 4)).astype("float32")

BY_ROWS = {
    "add a row": lambda x, y: x + KERNEL[:, 0],
    "add two": lambda x, y: x + y,
    "argmax": lambda x, y: ops.argmax(x, axis=-1),
    "binary crossentropy": lambda x, y: ops.binary_crossentropy(ops.sigmoid(x), ops.sigmoid(y)),
    "broadcast": lambda x, y: ops.broadcast_to(KERNEL[:1, :1], (ops.shape(x)[0], 4)) + x,
    "categorical": lambda x, y: ops.categorical_crossentropy(ops.softmax(x), ops.softmax(y)),
    "clip": lambda x, y: ops.clip(x, -0.5, 0.5),
    "class of a list": lambda x, y: ops.sum(x) if isinstance(x, list | tuple) else x * 2,
    "clip by columns": lambda x, y: ops.clip(x, KERNEL[:, 0] - 1, KERNEL[:, 0] + 1),
    "columns": lambda x, y: x[:, 1:3],
    "concatenate": lambda x, y: ops.concatenate([x, y], axis=1),
    "cumsum": lambda x, y: ops.cumsum(x, axis=1),
    "dot": lambda x, y: ops.dot(x, KERNEL),
    "einsum": lambda x, y: ops.einsum("bi,ij->bj", x, KERNEL),
    "einsum of two": lambda x, y: ops.einsum("bi,bj->bij", x, y),
    "ellipsis": lambda x, y: x[..., None],
    "expand": lambda x, y: ops.expand_dims(x, -1),
    "flip": lambda x, y: ops.flip(x, axis=1),
    "full": lambda x, y: x + ops.full((ops.shape(x)[0], 1), 3.0),
    "gelu": lambda x, y: keras.activations.gelu(x),
    "layer norm": lambda x, y: ops.layer_normalization(x, KERNEL[:, 0], KERNEL[:, 1], axis=-1),
    "logsumexp": lambda x, y: ops.logsumexp(x, axis=-1, keepdims=True),
    "matmul": lambda x, y: ops.matmul(x, KERNEL),
    "matmul of steps": lambda x, y: ops.matmul(x[:, :, None], y[:, None, :]),
    "merged": lambda x, y: ops.reshape(ops.reshape(x, (-1, 2)) * 2, (-1, 4)),
    "moveaxis": lambda x, y: ops.moveaxis(x[:, :, None], 1, 2),
    "normalize": lambda x, y: ops.normalize(x, axis=-1),
    "one hot": lambda x, y: ops.one_hot(ops.argmax(x, axis=-1), 4),
    "pad": lambda x, y: ops.pad(x, ((0, 0), (1, 1))),
    "repeat": lambda x, y: ops.repeat(x, 2, axis=1),
    "repeat one row": lambda x, y: ops.repeat(KERNEL[:1], ops.shape(x)[0], axis=0) + x[:, :3],
    "reshape": lambda x, y: ops.reshape(x, (ops.shape(x)[0], 2, 2)),
    "reshape to the static rows": lambda x, y: ops.reshape(x, (x.shape[0] or -1, 2, 2)),
    "reshape and infer": lambda x, y: ops.reshape(x, (ops.shape(x)[0], -1, 1)),
    "roll": lambda x, y: ops.roll(x, 1, axis=1),
    "rows in a slice": lambda x, y: x[: ops.shape(x)[0], 1:],
    "slice": lambda x, y: ops.slice(x, (0, 1), (ops.shape(x)[0], 2)),
    "sort": lambda x, y: ops.sort(x, axis=-1),
    "split": lambda x, y: ops.split(x, 2, axis=1)[1],
    "squeeze": lambda x, y: ops.squeeze(x[:, None, :], 1),
    "stack": lambda x, y: ops.stack([x, y], axis=2),
    "swapaxes": lambda x, y: ops.swapaxes(x[:, :, None] * y[:, None, :], 1, 2),
    "take": lambda x, y: ops.take(KERNEL, ops.argmax(x, axis=-1), axis=0),
    "take along": lambda x, y: ops.take_along_axis(x, ops.argsort(y, axis=-1), axis=1),
    "tf.gather along a row": lambda x, y: tf.gather(x, ops.argsort(y, axis=-1), batch_dims=1),
    "take columns": lambda x, y: ops.take(x, [2, 0], axis=1),
    "tensordot": lambda x, y: ops.tensordot(x, KERNEL, axes=1),
    "tile": lambda x, y: ops.tile(x, (1, 2)),
    "tile one row": lambda x, y: ops.tile(KERNEL[:1], (ops.shape(x)[0], 1)) + x[:, :3],
    "top k": lambda x, y: ops.top_k(x, 2)[0],
    "transpose": lambda x, y: ops.transpose(x[:, :, None], (0, 2, 1)),
    "tril": lambda x, y: ops.tril(x[:, :, None] * y[:, None, :]),
    "variance": lambda x, y: ops.var(x, axis=-1),
    "where": lambda x, y: ops.where(x > 0, x, y),
    "zeros": lambda x, y: x + ops.zeros((ops.shape(x)[0], 4)),
}


def _centered(x):
    return x - ops.mean(x, axis=0, keepdims=True)


def _caught(x):
    try:
        return x * float(x[0, 0])
    except TypeError:
        return x


ACROSS = {
    "a branch on an attribute": lambda x, y: _centered(x) if hasattr(x, "numpy") else x,
    "a branch on a symbolic tensor": lambda x, y: (
        x if keras.utils.is_keras_tensor(x) else _centered(x)
    ),
    "a branch on the class": lambda x, y: x if isinstance(x, keras.KerasTensor) else _centered(x),
    "a branch on the dtype": lambda x, y: x if isinstance(x.dtype, str) else _centered(x),
    "a branch on a tensor of the backend": lambda x, y: _centered(x) if ops.is_tensor(x) else x,
    "a read that fails": lambda x, y: _caught(x),
    "equal numbers in columns and rows": lambda x, y: ops.cast(x[:, :1] == x[:, 0], "float32"),
    "the static number of rows": lambda x, y: x / (x.shape[0] or 1),
    "a list with as many rows": lambda x, y: x + AS_MANY_AS_ROWS.tolist(),
    "all merged": lambda x, y: x / ops.sum(ops.reshape(x, (-1,))),
    "an array with as many rows": lambda x, y: x + AS_MANY_AS_ROWS,
    "an axis of None": lambda x, y: x + ops.mean(x),
    "clip by an array of rows": lambda x, y: ops.clip(x, AS_MANY_AS_ROWS, 9.0),
    "clip by lists of rows": lambda x, y: ops.clip(x, AS_MANY_AS_ROWS.tolist(), 9.0),
    "columns against rows": lambda x, y: x[:, :1] - y[:, 0],
    "concatenated rows": lambda x, y: ops.concatenate([x, y], axis=0)[::2],
    "einsum over rows": lambda x, y: ops.einsum("bi,bj->ij", x, y),
    "ellipsis of one dim": lambda x, y: x - x[:, 0][..., :1],
    "flipped rows": lambda x, y: ops.flip(x, axis=0),
    "flipped everything": lambda x, y: ops.flip(x),
    "matmul of rows": lambda x, y: ops.matmul(x, ops.transpose(y)),
    "normalized rows": lambda x, y: ops.normalize(x, axis=0),
    "outer of one dim": lambda x, y: x[:, 0] + x[:, :1],
    "padded rows": lambda x, y: ops.pad(x, ((1, 0), (0, 0)))[:-1],
    "rolled rows": lambda x, y: ops.roll(x, 1, axis=0),
    "softmax of one dim": lambda x, y: ops.softmax(x[:, 0]),
    "sorted rows": lambda x, y: ops.sort(x, axis=0),
    "steps against rows": lambda x, y: ops.reshape(ops.reshape(x, (-1, 2))[:, 0], (2, -1)),
    "subtract the first row": lambda x, y: x - x[:1],
    "tf.gather of rows": lambda x, y: tf.gather(x, ops.argsort(y[:, 0])),
    "taken rows": lambda x, y: ops.take(x, [0] * ROWS, axis=0),
    "the number of rows": lambda x, y: x * ops.cast(ops.shape(x)[0], "float32"),
    "the rows of a mean": lambda x, y: x - ops.mean(x, axis=0, keepdims=True),
    "tiled rows": lambda x, y: ops.tile(x, (2, 1))[::2],
}


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=(ROWS, 4)).astype("float32") for _ in range(2))


def _apart(function, batch):
    """Whether each row of a function's values depends on that row of the batch alone."""
    whole = ops.convert_to_numpy(function(*map(ops.convert_to_tensor, batch)))
    if whole.shape[:1] != (ROWS,):
        return False
    for row in range(ROWS):
        changed = [np.where(np.arange(ROWS)[:, None] == row, x, x[::-1] * 3) for x in batch]
        few = [x[row : row + 1] for x in batch]
        for other, place in ((changed, row), (few, 0)):
            try:
                found = function(*map(ops.convert_to_tensor, other))
            except Exception:
                return False
            found = ops.convert_to_numpy(found)
            if len(found) <= place or not np.allclose(found[place], whole[row], atol=1e-5):
                return False
    return True


@pytest.mark.parametrize("name", BY_ROWS)
def test_a_function_that_works_row_by_row_is_known(name, batch):
    assert _apart(BY_ROWS[name], batch)
    assert function_refused(BY_ROWS[name], batch, scratch=ScratchGraph) is None


@pytest.mark.parametrize("name", ACROSS)
def test_a_function_that_looks_across_rows_is_refused(name, batch):
    assert not _apart(ACROSS[name], batch)
    assert function_refused(ACROSS[name], batch, scratch=ScratchGraph) is not None


def test_every_rule_has_the_name_of_an_operation_of_keras():
    """A rule of another name would never be asked."""
    modules = (
        keras.src.ops.core,
        keras.src.ops.image,
        keras.src.ops.linalg,
        keras.src.ops.math,
        keras.src.ops.nn,
        keras.src.ops.numpy,
    )
    assert [name for name in RULES if not any(hasattr(m, name) for m in modules)] == []
