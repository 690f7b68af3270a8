"""Tools that make, train, save and load models themselves."""

import tempfile
from contextlib import nullcontext

import bayesflow
import keras
import keras_tuner
from keras import layers
from sklearn.model_selection import cross_val_score

from tests.third_party.row import BACKEND, Row, digits, numbers

AS_IMPORTED = nullcontext
if BACKEND == "torch":  # bayesflow turns gradients off where it is imported, and trains with them
    import torch

    AS_IMPORTED = torch.no_grad
    torch.set_grad_enabled(True)  # for the other rows


def tuner(distribute):
    """Each trial is distributed where it is built; the best is loaded from its file."""

    def build(choices):
        keras.utils.set_random_seed(5)
        model = keras.Sequential(
            [
                keras.Input((16, 16, 3)),
                layers.Conv2D(choices.Choice("filters", [4, 8]), 3, strides=2, activation="gelu"),
                layers.BatchNormalization(),
                layers.Flatten(),
                layers.Dense(10, activation="softmax"),
            ]
        )
        rate = choices.Float("rate", 1e-3, 1e-1, sampling="log")
        model.compile(keras.optimizers.SGD(rate), "sparse_categorical_crossentropy")
        return distribute(model)

    x, y = digits()
    with tempfile.TemporaryDirectory() as folder:
        search = keras_tuner.RandomSearch(
            build, objective="val_loss", max_trials=3, seed=3, directory=folder
        )
        search.search(
            x[:30], y[:30], validation_data=(x[30:], y[30:]), batch_size=8, epochs=2, verbose=0
        )
        trials = search.oracle.get_best_trials(3)
        best = search.get_best_models(1)[0]
        return [(t.trial_id, t.score, t.hyperparameters.values) for t in trials], best.predict(x)


def sklearn_wrapper(distribute):
    """A classifier and a regressor of `keras.wrappers`, by themselves and in cross-validation."""

    def network(X, y, loss, outputs, activation=None):
        keras.utils.set_random_seed(5)
        model = keras.Sequential(
            [
                keras.Input(X.shape[1:]),
                layers.Dense(12, activation="gelu"),
                layers.Dense(outputs, activation=activation),
            ]
        )
        model.compile(keras.optimizers.Adam(1e-2), loss)
        return distribute(model)

    options = {"batch_size": 8, "epochs": 2, "verbose": 0}
    x, y = digits(60, size=8, channels=1)
    x = x.reshape(60, -1)
    classifier = keras.wrappers.SKLearnClassifier(
        network,
        model_kwargs={"loss": "categorical_crossentropy", "outputs": 10, "activation": "softmax"},
        fit_kwargs=options,
    )
    scores = cross_val_score(classifier, x, y, cv=2)
    classes = classifier.fit(x, y).predict(x)
    regressor = keras.wrappers.SKLearnRegressor(
        network, model_kwargs={"loss": "mse", "outputs": 1}, fit_kwargs=options
    )
    return scores, classes, regressor.fit(x, y.astype(x.dtype)).predict(x)


def approximator(distribute):
    """A posterior from simulations: a coupling flow behind a summary network."""
    real = keras.config.floatx()
    theta = numbers(22, 2)
    data = {"theta": theta, "x": theta[:, None] + numbers(22, 6, 2, seed=1)}
    adapter = bayesflow.Adapter().convert_dtype("float64", real)
    adapter = adapter.rename("theta", "inference_variables").rename("x", "summary_variables")
    model = bayesflow.ContinuousApproximator(
        adapter=adapter,
        inference_network=bayesflow.networks.CouplingFlow(
            depth=2, subnet_kwargs={"widths": (8,), "dropout": 0.0}
        ),
        summary_network=bayesflow.networks.DeepSet(summary_dim=4, depth=1, dropout=0.0),
    )
    model.compile(optimizer=keras.optimizers.SGD(1e-3))
    distribute(model)
    simulations = bayesflow.OfflineDataset(data, batch_size=6, adapter=adapter, shuffle=False)
    with AS_IMPORTED():
        history = model.fit(dataset=simulations, epochs=2, verbose=0).history
        drawn = model.sample(num_samples=5, conditions={"x": data["x"][:3]}, seed=7)
    return history, drawn


ROWS = {
    "KerasTuner, random search": Row(tuner),
    "keras.wrappers for scikit-learn": Row(sklearn_wrapper),
    "bayesflow, continuous approximator": Row(
        approximator,
        float32="its base distribution is float32",
        unsplit=dict.fromkeys(("tensorflow", "torch"), "every device runs 'standardize'"),
    ),
}
