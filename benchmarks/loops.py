"""The loops that the benchmarks compare, and what they have in common."""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from rows import BATCH

Run = Callable[[], None]


def compiled(build: Callable[[], keras.Model], times: int | str = 1) -> keras.Model:
    """The model, from the same start each time, with loss, optimizer and a metric."""
    keras.utils.set_random_seed(0)
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.Adam(1e-3),
        loss,
        metrics=["sparse_categorical_accuracy"],
        steps_per_execution=times,
    )
    return model


def layouts(devices: int) -> tuple[Any, Any]:
    """Of what every device has, and of what is split by rows; `None` where there is one device."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    if devices == 1:
        return None, None
    mesh = Mesh(np.array(jax.devices()[:devices]), ("batch",))
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("batch"))


def by_hand(model: keras.Model, x: np.ndarray, y: np.ndarray, devices: int = 1) -> Run:
    """One epoch of a loop as Keras's guide to JAX writes it, with the same metrics."""
    import jax

    everywhere, by_rows = layouts(devices)
    optimizer, loss_function = model.optimizer, model.loss
    optimizer.build(model.trainable_variables)
    mean = keras.metrics.Mean()
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    def loss_of(trainable: Any, non_trainable: Any, x: Any, y: Any) -> Any:
        y_pred, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
        return loss_function(y, y_pred), (y_pred, non_trainable)

    def step(state: Any, x: Any, y: Any) -> Any:
        trainable, non_trainable, slots, means, hits = state
        gradient = jax.value_and_grad(loss_of, has_aux=True)
        (loss, (y_pred, non_trainable)), gradients = gradient(trainable, non_trainable, x, y)
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        means = mean.stateless_update_state(means, loss, sample_weight=x.shape[0])
        hits = accuracy.stateless_update_state(hits, y, y_pred)
        logs = {"loss": mean.stateless_result(means), "acc": accuracy.stateless_result(hits)}
        return logs, (trainable, non_trainable, slots, means, hits)

    run = _over(by_rows, 2, jax.jit(step, donate_argnums=0, out_shardings=everywhere))
    variables = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    kept = [jax.device_put(_copies(*variables), everywhere)]

    def epoch() -> None:
        counts = jax.device_put(_copies(mean.variables, accuracy.variables), everywhere)
        state = (*kept[0], *counts)
        order = np.random.permutation(len(x))
        for start in range(0, len(x), BATCH):
            rows = order[start : start + BATCH]
            logs, state = run(state, x[rows], y[rows])
        {name: float(value) for name, value in logs.items()}
        kept[0] = state[:3]

    return epoch


def barest_by_hand(model: keras.Model, x: np.ndarray, y: np.ndarray, devices: int = 1) -> Run:
    """One epoch of the shortest loop: it updates weights, and knows no loss and no metric."""
    import jax

    everywhere, by_rows = layouts(devices)
    optimizer, loss_function = model.optimizer, model.loss
    optimizer.build(model.trainable_variables)

    def loss_of(trainable: Any, non_trainable: Any, x: Any, y: Any) -> Any:
        y_pred, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
        return loss_function(y, y_pred), non_trainable

    def step(trainable: Any, non_trainable: Any, slots: Any, x: Any, y: Any) -> Any:
        gradients, non_trainable = jax.grad(loss_of, has_aux=True)(trainable, non_trainable, x, y)
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        return trainable, non_trainable, slots

    run = _over(by_rows, 2, jax.jit(step, donate_argnums=(0, 1, 2), out_shardings=everywhere))
    variables = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    kept = [jax.device_put(_copies(*variables), everywhere)]

    def epoch() -> None:
        order = np.random.permutation(len(x))
        for start in range(0, len(x), BATCH):
            rows = order[start : start + BATCH]
            kept[0] = run(*kept[0], x[rows], y[rows])
        jax.block_until_ready(kept[0])

    return epoch


def evaluated_by_hand(model: keras.Model, x: np.ndarray, y: np.ndarray, devices: int = 1) -> Run:
    """One evaluation by a jitted loop, with the same metrics."""
    import jax

    everywhere, by_rows = layouts(devices)
    loss_function = model.loss
    mean = keras.metrics.Mean()
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    def step(means: Any, hits: Any, weights: Any, x: Any, y: Any) -> Any:
        y_pred, _ = model.stateless_call(*weights, x, training=False)
        means = mean.stateless_update_state(
            means, loss_function(y, y_pred), sample_weight=x.shape[0]
        )
        hits = accuracy.stateless_update_state(hits, y, y_pred)
        logs = {"loss": mean.stateless_result(means), "acc": accuracy.stateless_result(hits)}
        return logs, means, hits

    run = _over(by_rows, 2, jax.jit(step, donate_argnums=(0, 1), out_shardings=everywhere))
    weights = jax.device_put(_values(model), everywhere)

    def evaluate() -> None:
        means, hits = jax.device_put(_copies(mean.variables, accuracy.variables), everywhere)
        for start in range(0, len(x), BATCH):
            rows = slice(start, start + BATCH)
            logs, means, hits = run(means, hits, weights, x[rows], y[rows])
        {name: float(value) for name, value in logs.items()}

    return evaluate


def predicted_by_hand(model: keras.Model, x: np.ndarray, devices: int = 1) -> Run:
    """One prediction by a jitted loop, whose rows are put together at the end."""
    import jax

    everywhere, by_rows = layouts(devices)
    forward = jax.jit(lambda weights, x: model.stateless_call(*weights, x, training=False)[0])
    run = _over(by_rows, 1, forward)
    weights = jax.device_put(_values(model), everywhere)

    def predict() -> None:
        parts = [run(weights, x[start : start + BATCH]) for start in range(0, len(x), BATCH)]
        np.concatenate([np.asarray(part) for part in parts])

    return predict


def _over(by_rows: Any, parts: int, run: Callable[..., Any]) -> Callable[..., Any]:
    """The same step, whose last arguments, so many parts of a batch, are split over devices."""
    import jax

    if by_rows is None:
        return run

    def placed(*given: Any) -> Any:
        return run(*given[:-parts], *jax.device_put(given[-parts:], by_rows))

    return placed


def _copies(*groups: list[Any]) -> Any:
    return tuple([variable.value + 0 for variable in group] for group in groups)


def _values(model: keras.Model) -> Any:
    groups = (model.trainable_variables, model.non_trainable_variables)
    return tuple([v.value for v in group] for group in groups)


def by_hand_tensorflow(model: keras.Model, x: np.ndarray, y: np.ndarray) -> Run:
    """The same loop as Keras's guide to TensorFlow writes it, with XLA where `fit` has it."""
    import tensorflow as tf

    optimizer, loss_function = model.optimizer, model.loss
    optimizer.build(model.trainable_variables)
    mean = keras.metrics.Mean()
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    @tf.function(jit_compile=model.jit_compile)
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True)
            loss = loss_function(y, y_pred)
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply(gradients, model.trainable_weights)
        mean.update_state(loss)
        accuracy.update_state(y, y_pred)

    def epoch() -> None:
        mean.reset_state()
        accuracy.reset_state()
        order = np.random.permutation(len(x))
        for start in range(0, len(x), BATCH):
            rows = order[start : start + BATCH]
            step(tf.constant(x[rows]), tf.constant(y[rows]))
        float(mean.result()), float(accuracy.result())

    return epoch


def by_evaluate(model: keras.Model, x: np.ndarray, y: np.ndarray) -> Run:
    """One `evaluate`, with the progress bar."""

    def evaluate() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            model.evaluate(x, y, batch_size=BATCH)

    return evaluate


def by_predict(model: keras.Model, x: np.ndarray) -> Run:
    """One `predict`, with the progress bar."""

    def predict() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            model.predict(x, batch_size=BATCH)

    return predict


def by_fit(model: keras.Model, x: np.ndarray, y: np.ndarray, **kwargs: Any) -> Run:
    """One epoch of `fit`, with progress bar and stock callbacks."""

    def epoch() -> None:
        callbacks = [
            keras.callbacks.EarlyStopping("loss", patience=1000),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1000),
        ]
        with contextlib.redirect_stdout(io.StringIO()):
            model.fit(x, y, batch_size=BATCH, callbacks=callbacks, **kwargs)

    return epoch


def by_batches(method: str) -> Callable[..., Run]:
    """One call of this `*_on_batch` method after the other."""

    def by_method(model: keras.Model, *parts: np.ndarray) -> Run:
        on_batch = getattr(model, method)

        def run() -> None:
            for start in range(0, len(parts[0]), BATCH):
                on_batch(*(part[start : start + BATCH] for part in parts))

        return run

    return by_method
