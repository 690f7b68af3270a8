"""Losses and metrics of every form."""

import keras
from keras import layers, ops

from tests.conformance.cases.case import Case, classes, features, fitted_with, rows_of, weighted


def _sgd(rate=0.05):
    return keras.optimizers.SGD(rate, momentum=0.9)


def _network(width=2, activation=None):
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5, activation="tanh"),
            layers.Dense(width, activation=activation),
        ]
    )


def _compiled(loss, width=2, activation=None, rate=0.05, **options):
    def make(sizes):
        model = _network(width, activation)
        model.compile(_sgd(rate), loss, **options)
        return model

    return make


# ------------------------------------------------------------------------------ masks


def _tokens(rows, rng):
    """Rows of seven tokens, of which the last few are zero: one row is all zero."""
    tokens = rng.integers(1, 20, (rows, 7))
    length = rng.integers(0, 8, (rows, 1))
    length[0] = 0
    return (tokens * (range(7) < length)).astype("int32")


def _padded(rows, rng):
    x = rng.normal(size=(rows, 7, 3)).astype("float32")
    return x * (range(7) < rng.integers(1, 8, (rows, 1)))[..., None].astype("float32")


def _temporal_weight(rows, rng):
    return rng.uniform(0, 2, (rows, 7)).astype("float32")


def _column_of_weights(rows, rng):
    return weighted(rows, rng)[:, None]


def _embedding(sizes):
    model = keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            layers.Embedding(20, 4, mask_zero=True),
            layers.Dense(3, activation="tanh"),
            layers.Dense(2),
        ]
    )
    model.compile(_sgd(), "mse", metrics=["mae"], weighted_metrics=["mse"])
    return model


def _masking(sizes):
    model = keras.Sequential(
        [
            keras.Input((7, 3)),
            layers.Masking(),
            layers.SimpleRNN(4, return_sequences=True),
            layers.Dense(2),
        ]
    )
    model.compile(_sgd(), "mae", weighted_metrics=["mse"])
    return model


# ---------------------------------------------------------------- what looks across rows


def _dice(y_true, y_pred):
    both = ops.sum(y_true * y_pred)
    return 1 - (2 * both + 1) / (ops.sum(y_true) + ops.sum(y_pred) + 1)


def _correlation(y_true, y_pred):
    true, pred = y_true - ops.mean(y_true, axis=0), y_pred - ops.mean(y_pred, axis=0)
    spread = ops.sqrt(ops.sum(true**2, axis=0) * ops.sum(pred**2, axis=0) + 1e-3)
    return 1 - ops.mean(ops.sum(true * pred, axis=0) / spread)


def _contrastive(y_true, y_pred):
    """Every row against every other row of the batch."""
    likeness = ops.matmul(y_pred, ops.transpose(y_true))
    return ops.mean(ops.logsumexp(likeness, axis=1) - ops.diagonal(likeness))


class _OwnReduction(keras.Model):
    """A loss without reduction, that the model reduces in a way of its own."""

    def __init__(self):
        super().__init__(name="own_reduction")  # TensorFlow takes no underscore in front
        self.inner = _network()
        self.loss_of_rows = keras.losses.MeanSquaredError(reduction="none")

    def call(self, x):
        return self.inner(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.logsumexp(self.loss_of_rows(y, y_pred)) / 4


def _own_reduction(sizes):
    model = _OwnReduction()
    model.build((None, 4))
    model.compile(_sgd())
    return model


class _Added(layers.Layer):
    """Adds the spread of the whole batch to the loss."""

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.std(x, axis=0)))
        return x


def _added_loss(sizes):
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(5, activation="tanh"), _Added(), layers.Dense(2)]
    )
    model.compile(_sgd(), "mse")
    return model


def _several_outputs(sizes):
    inputs = keras.Input((4,))
    hidden = layers.Dense(5, activation="tanh")(inputs)
    outputs = {
        "number": layers.Dense(2, name="number")(hidden),
        "kind": layers.Dense(3, activation="softmax", name="kind")(hidden),
    }
    model = keras.Model(inputs, outputs)
    model.compile(
        _sgd(),
        {"number": "huber", "kind": "sparse_categorical_crossentropy"},
        loss_weights={"number": 0.3, "kind": 1.7},
        metrics={"kind": ["accuracy"]},
    )
    return model


def _several_targets(rows, rng):
    return {"number": features(2)(rows, rng), "kind": classes(3)(rows, rng)}


# ---------------------------------------------------------------------------- metrics


class _Extreme(keras.metrics.Metric):
    """The largest and the smallest error so far: no mean of devices gives it."""

    def __init__(self, name="extreme"):
        super().__init__(name=name)
        self.high = self.add_weight(name="high", initializer="zeros")
        self.low = self.add_weight(name="low", initializer=lambda *a, **k: ops.full((), 1e3))

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = ops.abs(y_true - y_pred)
        self.high.assign(ops.maximum(self.high, ops.max(error)))
        self.low.assign(ops.minimum(self.low, ops.min(error)))

    def result(self):
        return {"largest": self.high + 0.0, "smallest": self.low + 0.0}

    def reset_state(self):
        self.high.assign(0.0)
        self.low.assign(1e3)


class _RowsSeen(keras.metrics.Metric):
    """Counts the rows of an epoch."""

    def __init__(self, name="rows"):
        super().__init__(name=name)
        self.seen = self.add_weight(name="seen", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.seen.assign_add(ops.cast(ops.shape(y_true)[0], "float32"))

    def result(self):
        return self.seen + 0.0


def _counting_metrics(sizes):
    model = _network(3, "softmax")
    metrics = [
        "accuracy",
        keras.metrics.AUC(num_thresholds=20, multi_label=True),
        keras.metrics.F1Score(average="macro"),
        keras.metrics.OneHotMeanIoU(3),
        keras.metrics.Precision(),
        keras.metrics.Recall(top_k=2),
        keras.metrics.TopKCategoricalAccuracy(2),
    ]
    model.compile(_sgd(), "categorical_crossentropy", metrics=metrics, weighted_metrics=["mse"])
    return model


def _mean_iou(sizes):
    model = _network(1, "sigmoid")
    metrics = [keras.metrics.BinaryIoU([0, 1]), keras.metrics.R2Score(), "mae"]
    model.compile(_sgd(), "binary_crossentropy", metrics=metrics)
    return model


def _one_hot(rows, rng):
    return keras.utils.to_categorical(rng.integers(0, 3, rows), 3).astype("float32")


def _yes_or_no(rows, rng):
    return rng.integers(0, 2, (rows, 1)).astype("float32")


# ------------------------------------------------------------------------------ cases

_PLAIN = rows_of(features(4), features(2))
_WITH_WEIGHT = rows_of(features(4), features(2), weighted)


def _with_reduction(reduction, rate=0.05):
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    return Case(
        _compiled(loss, rate=rate, weighted_metrics=["mae"]),
        rows_of(features(4), lambda rows, rng: features(2)(rows, rng) / 4, weighted),
    )


LOSSES = {
    "embedding mask": Case(_embedding, rows_of(_tokens, features(7, 2))),
    "embedding mask and temporal weights": Case(
        _embedding, rows_of(_tokens, features(7, 2), _temporal_weight)
    ),
    "masking layer and row weights": Case(
        _masking, rows_of(_padded, features(7, 2), _column_of_weights)
    ),
    "row weights": Case(_compiled("mse", metrics=["mae"], weighted_metrics=["mae"]), _WITH_WEIGHT),
    "reduction sum_over_batch_size": _with_reduction("sum_over_batch_size"),
    "reduction sum": _with_reduction("sum", rate=0.005),
    "reduction mean": _with_reduction("mean"),
    "reduction mean_with_sample_weight": _with_reduction("mean_with_sample_weight"),
    "reduction none, reduced by the model": Case(_own_reduction),
    "scalar custom loss (Dice)": Case(
        _compiled(_dice, 1, "sigmoid"), rows_of(features(4), _yes_or_no)
    ),
    "scalar custom loss (correlation)": Case(_compiled(_correlation)),
    "in-batch contrastive loss": Case(_compiled(_contrastive)),
    "several outputs, loss weights": Case(_several_outputs, rows_of(features(4), _several_targets)),
    "add_loss over the batch": Case(_added_loss),
    "AUC, F1, IoU, precision, recall": Case(
        _counting_metrics, rows_of(features(4), _one_hot, weighted)
    ),
    "binary IoU, R2": Case(_mean_iou, rows_of(features(4), _yes_or_no)),
    "metrics of largest and smallest": Case(_compiled("mse", metrics=[_Extreme]), _PLAIN),
    "metrics reset between epochs": Case(
        _compiled("mse", metrics=[_RowsSeen, _Extreme]), _PLAIN, fitted_with(epochs=3)
    ),
}
