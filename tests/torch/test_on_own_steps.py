"""Steps of a user's own, and models that look across the batch: all devices share their layers."""

import functools
import os
import signal

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.attach.attachment import attachment_of
from lockstep.engines.torch.steps import whole_batch_steps
from lockstep.errors import UnsplitBatchWarning, UnsupportedModel, WorkerDied
from tests.agreement import assert_equal, both

QUIET = {"verbose": 0, "shuffle": False}
SHARED = pytest.mark.filterwarnings("error::lockstep.errors.UnsplitBatchWarning")


def numbers(*shape, seed=5):
    return np.random.default_rng(seed).normal(size=shape)


def gradients(loss, variables):
    """Let PyTorch compute them, as users do."""
    for variable in variables:
        variable.value.grad = None
    loss.backward()
    return [variable.value.grad for variable in variables]


class Gan(keras.Model):
    """WGAN-GP, with a penalty on a gradient, two optimizers and several steps of the critic."""

    def __init__(self):
        super().__init__()
        self.critic = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(8),
                layers.LeakyReLU(),
                layers.LayerNormalization(),
                layers.Dense(1),
            ],
            name="critic",
        )
        self.generator = keras.Sequential(
            [keras.Input((3,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(4)],
            name="generator",
        )
        self.seeds = keras.random.SeedGenerator(7)
        self.built = True
        self.critic_loss = keras.metrics.Mean(name="critic")
        self.generator_loss = keras.metrics.Mean(name="generator")

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.of_critic = keras.optimizers.Adam(1e-2, beta_1=0.5)
        self.of_generator = keras.optimizers.RMSprop(1e-2)

    @property
    def metrics(self):
        return [self.critic_loss, self.generator_loss]

    def penalty(self, real, fake):
        mix = keras.random.uniform((len(real), 1), seed=self.seeds)
        between = (real + mix * (fake - real)).detach().requires_grad_()
        (slopes,) = torch.autograd.grad(
            self.critic(between, training=True).sum(), between, create_graph=True
        )
        return ((slopes.pow(2).sum(1) + 1e-12).sqrt() - 1).pow(2).mean()

    def train_step(self, real):
        for _ in range(2):
            noise = keras.random.normal((len(real), 3), seed=self.seeds)
            fake = self.generator(noise, training=True)
            every = self.critic(ops.concatenate([fake, real]), training=True)
            loss = every[: len(real)].mean() - every[len(real) :].mean()
            loss = loss + 10 * self.penalty(real, fake)
            weights = self.critic.trainable_variables
            grads = gradients(loss, weights)
            with torch.no_grad():
                self.of_critic.apply(grads, weights)
            self.critic_loss.update_state(loss)
        noise = keras.random.normal((len(real), 3), seed=self.seeds)
        loss = -self.critic(self.generator(noise, training=True), training=True).mean()
        weights = self.generator.trainable_variables
        grads = gradients(loss, weights)
        with torch.no_grad():
            self.of_generator.apply(grads, weights)
        self.generator_loss.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}


class Vae(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((4,)), layers.Dense(6, "tanh")])
        self.mean, self.log_var = layers.Dense(2), layers.Dense(2)
        self.decoder = keras.Sequential([keras.Input((2,)), layers.Dense(4)])
        self.seeds = keras.random.SeedGenerator(1)
        self.mean.build((None, 6))
        self.log_var.build((None, 6))

    def call(self, x):
        return self.decoder(self.mean(self.encoder(x)))

    def parts(self, x):
        inner = self.encoder(x)
        mean, log_var = self.mean(inner), self.log_var(inner)
        z = mean + ops.exp(log_var / 2) * keras.random.normal(ops.shape(mean), seed=self.seeds)
        kl = -0.5 * ops.mean(1 + log_var - ops.square(mean) - ops.exp(log_var))
        return ops.mean(ops.square(x - self.decoder(z))), kl

    def train_step(self, x):
        rebuilt, kl = self.parts(x)
        self.zero_grad()
        loss = rebuilt + kl
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        return {"rebuilt": rebuilt, "kl": kl}

    def test_step(self, x):
        rebuilt, kl = self.parts(x)
        return {"rebuilt": rebuilt, "kl": kl}


class Contrast(keras.Model):
    """Like MoCo: every row is compared with all others, with a queue, and an averaged twin."""

    def __init__(self):
        super().__init__()
        self.encoder, self.twin = (
            keras.Sequential([keras.Input((4,)), layers.Dense(6), layers.UnitNormalization()])
            for _ in range(2)
        )
        self.twin.trainable = False
        self.built = True
        self.queue = self.add_weight((12, 6), initializer="random_normal", trainable=False)

    def train_step(self, x):
        keys = self.twin(x).detach()
        queries = self.encoder(x, training=True)
        scores = ops.matmul(queries, ops.transpose(ops.concatenate([keys, self.queue]))) / 0.1
        loss = ops.mean(
            ops.sparse_categorical_crossentropy(
                ops.arange(len(x)), ops.softmax(scores), from_logits=False
            )
        )
        weights = self.encoder.trainable_variables
        grads = gradients(loss, weights)
        with torch.no_grad():
            self.optimizer.apply(grads, weights)
            pairs = zip(self.encoder.weights, self.twin.weights, strict=True)
            for weight, average in pairs:
                average.assign(0.9 * average + 0.1 * weight)
            self.queue.assign(ops.concatenate([keys, self.queue])[:12])
        return {"loss": loss}


def trained(build, *, batch_size=7, epochs=2, rows=19, evaluates=False, x=None):
    found = []
    for model in both(build):
        model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9))
        x = numbers(rows, 4) if x is None else x
        keras.utils.set_random_seed(3)
        history = model.fit(x, batch_size=batch_size, epochs=epochs, **QUIET).history
        scores = model.evaluate(x, batch_size=batch_size, verbose=0) if evaluates else {}
        found.append((history, scores, [ops.convert_to_numpy(v) for v in model.variables]))
    return found


@SHARED
@pytest.mark.parametrize("batch_size", [7, 2])
def test_a_gan_with_a_penalty_on_gradients(batch_size):
    one, many = trained(Gan, batch_size=batch_size, rows=3 * batch_size - 1)
    assert_equal(one, many)


@SHARED
def test_a_vae_whose_evaluation_has_a_step_of_its_own_too():
    one, many = trained(Vae, evaluates=True)
    assert_equal(one, many)


@SHARED
def test_every_row_against_all_others_with_a_queue_and_an_averaged_twin():
    one, many = trained(Contrast)
    assert_equal(one, many)


def simple_step(self, x):
    """A step as users write it, for a model with a `loss_of`."""
    loss = self.loss_of(x)
    weights = self.trainable_weights
    grads = gradients(loss, weights)
    with torch.no_grad():
        self.optimizer.apply(grads, weights)
    return {"loss": loss}


class Own(keras.Model):
    """A model whose step takes the loss that a test defines."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.built = True

    train_step = simple_step


def dense(units=5, inputs=4, **options):
    return keras.Sequential([keras.Input((inputs,)), layers.Dense(units, **options)])


class Regularized(Own):
    """Losses of weights, of outputs inside a shared call, and of the outputs of one."""

    def __init__(self):
        inside = layers.Dense(5, kernel_regularizer="l2", activity_regularizer="l1")
        last = layers.Dense(5, activity_regularizer="l2")
        inner = keras.Sequential([keras.Input((4,)), inside, layers.BatchNormalization()])
        last.build((None, 5))
        super().__init__(inner=inner, last=last)

    def loss_of(self, x):
        return ops.mean(ops.square(self.last(self.inner(x, training=True)))) + sum(self.losses)


class Masked(Own):
    """A mask that layers hand on, through calls that are shared one by one."""

    def __init__(self):
        embedding, rnn = layers.Embedding(9, 4, mask_zero=True), layers.LSTM(3)
        embedding.build((None, 6))
        rnn.build((None, 6, 4))
        super().__init__(embedding=embedding, rnn=rnn)

    def loss_of(self, x):
        outputs = self.rnn(self.embedding(x))
        return ops.mean(ops.square(outputs - ops.mean(outputs, axis=0)))


class Frozen(Own):
    """Parts are frozen within the step, and one layer uses the weight of another one."""

    def __init__(self):
        first, other = dense(4), Tied()
        super().__init__(first=first, other=other)
        other.weight_of = [first.layers[0]]
        other.build((None, 4))

    def loss_of(self, x):
        self.first.trainable = False
        frozen = ops.mean(ops.square(self.other(self.first(x)) - 1))
        self.first.trainable = True
        return frozen + ops.mean(ops.square(self.first(x)) * self.other.scale_of(x))


class Tied(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight((), initializer="ones")

    def call(self, x):
        return ops.matmul(x, self.weight_of[0].kernel) * self.scale

    def scale_of(self, x):
        return self.scale


class Numbered(Own):
    """NumPy's random numbers and an attribute that counts, in the code of the step."""

    def __init__(self):
        super().__init__(inner=dense(), counter=0)

    def loss_of(self, x):
        self.counter += 1
        chosen = ops.convert_to_tensor(np.random.permutation(len(x)))
        outputs = self.inner(ops.take(x, chosen, axis=0)[: len(x) // 2 + 1])
        return ops.mean(ops.square(outputs)) * (1 + self.counter)


class Twice(Own):
    """The same layer several times, in no_grad too, and on other numbers of rows."""

    def __init__(self):
        super().__init__(inner=dense())

    def loss_of(self, x):
        with torch.no_grad():
            target = self.inner(x[:1])
        outputs = self.inner(ops.concatenate([x, ops.flip(x, axis=0), x]))
        return ops.mean(ops.square(outputs - target)) + ops.mean(self.inner(x))


class Spectral(Own):
    def __init__(self):
        norm = layers.SpectralNormalization(layers.Dense(5))
        norm.build((None, 4))
        super().__init__(norm=norm, inner=dense())

    def loss_of(self, x):
        return ops.mean(ops.square(self.norm(x, training=True) - self.inner(x)))


class Accumulated(Own):
    """Gradients are added up over two steps, from one epoch to the next."""

    def __init__(self):
        super().__init__(inner=dense(), counter=0)

    def train_step(self, x):
        loss = ops.mean(ops.square(self.inner(x)))
        loss.backward()
        self.counter += 1
        if self.counter % 2 == 0:
            weights = self.trainable_weights
            with torch.no_grad():
                self.optimizer.apply([weight.value.grad / 2 for weight in weights], weights)
            self.zero_grad()
        return {}


class Guide(keras.Model):
    """The step of Keras's guide, with metrics, sample weights and losses of `compile`."""

    def __init__(self):
        super().__init__()
        self.inner = dense(1, activation="sigmoid")

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        self.zero_grad()
        y_pred = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
        return {metric.name: metric.result() for metric in self.metrics}


class Writing(layers.Layer):
    """On PyTorch, `*=` writes into the input, which is the output then."""

    def build(self, shape):
        self.factor = self.add_weight((4,))

    def call(self, x):
        x *= self.factor
        return x


class Written(Own):
    def __init__(self):
        writing = Writing()
        writing.build((None, 4))
        super().__init__(inner=dense(4), writing=writing)

    def loss_of(self, x):
        x = self.inner(x)
        outputs = self.writing(x)
        outputs += 1
        return ops.mean(ops.square(x))


@SHARED
@pytest.mark.parametrize("build", [Regularized, Frozen, Numbered, Twice, Accumulated, Written])
def test_what_steps_do(build):
    one, many = trained(build)
    assert_equal(one, many)


@SHARED
def test_a_mask_goes_from_one_shared_call_to_the_next():
    tokens = np.random.default_rng(3).integers(0, 9, size=(19, 6))
    one, many = trained(Masked, x=tokens)
    assert_equal(one, many)


@pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")
def test_a_layer_that_assigns_to_its_weights_runs_whole():
    one, many = trained(Spectral)
    assert_equal(one, many)


class Centered(layers.Layer):
    """It looks across the batch where an argument or an attribute says so."""

    def __init__(self):
        super().__init__()
        self.options, self.factor = {"centers": False}, None

    def build(self, shape):
        self.kernel = self.add_weight((4, 4))

    def call(self, x, centers=False, turns=False):
        y = ops.matmul(x, self.kernel)
        if self.factor is not None:
            y = y * self.factor
        if centers or self.options["centers"]:
            y = y - ops.mean(y, axis=0)
        return -y if turns else y


def centered():
    layer = Centered()
    layer.build((None, 4))
    return layer


class ByArgument(Own):
    def __init__(self):
        super().__init__(inner=centered())

    def loss_of(self, x):
        turned = self.inner(x, turns=True)
        return ops.mean(ops.square(turned - 1)) + ops.mean(ops.abs(self.inner(x, centers=True)))


class ByAttribute(Own):
    def __init__(self):
        super().__init__(inner=centered())

    def loss_of(self, x):
        self.inner.options["centers"] = False
        loss = ops.mean(ops.square(self.inner(x) - 1))
        self.inner.options["centers"] = True
        return loss + ops.mean(ops.abs(self.inner(x)))


def across(x):
    return x - ops.mean(x, axis=0)


class ByActivation(Own):
    def __init__(self):
        super().__init__(inner=dense(4))

    def loss_of(self, x):
        self.inner.layers[0].activation = keras.activations.tanh
        loss = ops.mean(ops.square(self.inner(x) - 1))
        self.inner.layers[0].activation = across
        return loss + ops.mean(ops.abs(self.inner(x)))


class Hyper(Own):
    """A layer computes with a tensor that another one has made."""

    def __init__(self):
        super().__init__(inner=centered(), hyper=dense(4))

    def loss_of(self, x):
        self.inner.factor = ops.mean(self.hyper(x), axis=0)
        loss = ops.mean(ops.square(self.inner(x) - 1))
        self.inner.factor = None
        return loss


class Holder:
    """No layer, so that Keras does not see what it holds."""


class Scaling(layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight((4,))

    def call(self, x, context=None):
        return x * self.factor * context.tensor


class Context(Own):
    """A layer is given an object that holds a tensor which another layer has made."""

    def __init__(self):
        scaling = Scaling()
        scaling.build((None, 4))
        super().__init__(inner=dense(4), scaling=scaling)

    def loss_of(self, x):
        context = Holder()
        context.tensor = ops.mean(self.inner(x), axis=0, keepdims=True)
        return ops.mean(ops.square(self.scaling(x, context=context) - 1))


@pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")
@pytest.mark.parametrize("build", [ByArgument, ByAttribute, ByActivation, Hyper, Context])
def test_the_same_layer_is_shared_in_one_call_and_not_in_another(build):
    one, many = trained(build)
    assert_equal(one, many)


class Borrowing(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight((4, 4))
        self.holder = Holder()

    def call(self, x, training=None):
        return self.holder.norm(ops.matmul(x, self.kernel), training=training)


class Borrowed(Own):
    def __init__(self):
        inner, norm = Borrowing(), layers.BatchNormalization()
        for layer in (inner, norm):
            layer.build((None, 4))
        inner.holder.norm = norm
        super().__init__(inner=inner, norm=norm)

    def loss_of(self, x):
        return ops.mean(ops.square(self.inner(x, training=True) - 1) * ops.arange(4))


@SHARED
def test_a_layer_may_call_a_batch_norm_of_the_model():
    one, many = trained(Borrowed)
    assert_equal(one, many)


class Elsewhere(Own):
    """A layer computes with the weight of a layer that Keras does not know."""

    def __init__(self):
        inner = Borrowing()
        inner.build((None, 4))
        inner.holder.norm = layers.LayerNormalization()
        inner.holder.norm.build((None, 4))
        super().__init__(inner=inner)

    def loss_of(self, x):
        return ops.mean(ops.square(self.inner(x, training=True) - 1))


class Again(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight((4, 4))

    def call(self, x):
        x = x.detach().requires_grad_()
        return checkpoint(lambda x: ops.matmul(x, self.kernel), x, use_reentrant=True)


class Recomputed(Own):
    def __init__(self):
        inner = lockstep.rowwise(Again())
        inner.build((None, 4))
        super().__init__(inner=inner)

    def loss_of(self, x):
        return ops.mean(ops.square(self.inner(x) - 1))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Elsewhere, "is neither an argument nor a weight of the model"),
        (Recomputed, "use_reentrant"),
    ],
)
def test_a_gradient_that_would_be_that_of_some_rows_is_refused(build, reason):
    _, model = both(build)
    model.compile(optimizer="sgd")
    with pytest.raises(UnsupportedModel, match=reason):
        model.fit(numbers(14, 4), batch_size=7, **QUIET)


class Hooked(Own):
    def __init__(self):
        super().__init__(inner=dense(3))
        self.inner.layers[0].kernel.value.register_hook(lambda gradient: gradient / 10)

    def loss_of(self, x):
        return ops.mean(ops.square(self.inner(x) - 1))


def test_a_hook_on_a_gradient_is_the_first_device_s():
    with pytest.warns(UnsplitBatchWarning, match="the hook on the gradient of .*/kernel' stays"):
        one, many = trained(Hooked)
    assert_equal(one, many)


class Across(keras.Model):
    """Keras's own step, of a model that looks across the batch."""

    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(6, "tanh"), layers.Dense(2)

    def call(self, x):
        x = self.first(x)
        return self.last(x - ops.mean(x, axis=0))


@SHARED
def test_keras_s_own_step_of_a_model_that_looks_across_the_batch():
    found = []
    x, y = numbers(19, 4), numbers(19, 2, seed=8)
    for model in both(Across):
        model.compile("adam", "mse", metrics=["mae"])
        history = model.fit(x, y, batch_size=7, epochs=2, validation_split=0.2, **QUIET).history
        scores = model.evaluate(x, y, batch_size=7, verbose=0)
        found.append((history, scores, model.predict(x, batch_size=7, verbose=0)))
    assert_equal(*found)


@pytest.mark.whole
@SHARED
def test_the_step_of_keras_s_guide_with_metrics_and_sample_weights():
    found = []
    x, y = numbers(19, 4), np.arange(19) % 2
    for model in both(Guide):
        model.compile("adam", "binary_crossentropy", metrics=["accuracy", "auc"])
        history = model.fit(
            x, y, sample_weight=np.arange(19) / 9, batch_size=7, epochs=3, **QUIET
        ).history
        found.append((history, [ops.convert_to_numpy(v) for v in model.variables]))
    assert_equal(*found)


class Indexed(Guide):
    """The step takes metrics by their place, and those of a part that it trains."""

    def __init__(self):
        super().__init__()
        self.part = dense(1, activation="sigmoid")

    def compile(self, **options):
        super().compile(**options)
        self.part.compile("sgd", "binary_crossentropy", metrics=["accuracy"])

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        _, accuracy = self.part.train_on_batch(ops.convert_to_numpy(x), ops.convert_to_numpy(y))
        y_pred = self(x, training=True)
        weights = self.inner.trainable_weights
        loss = self.compute_loss(y=y, y_pred=y_pred)
        grads = gradients(loss, weights)
        with torch.no_grad():
            self.optimizer.apply(grads, weights)
        self.metrics[0].update_state(loss)
        self.metrics[1].update_state(y, y_pred)
        return {"accuracy": accuracy, **{metric.name: metric.result() for metric in self.metrics}}


@SHARED
def test_a_step_may_read_metrics_of_compile():
    found = []
    x, y = numbers(19, 4), np.arange(19) % 2
    for model in both(Indexed):
        model.compile(optimizer="sgd", loss="binary_crossentropy", metrics=["mae"])
        history = model.fit(x, y, batch_size=7, epochs=3, **QUIET).history
        found.append((history, [ops.convert_to_numpy(v) for v in model.variables]))
    assert_equal(*found)


class NoLayer(Own):
    def __init__(self):
        super().__init__(factor=None)
        self.factor = self.add_weight((4,), initializer="ones")

    def loss_of(self, x):
        return ops.mean(ops.square(x * self.factor - 2))


def test_a_step_without_a_layer_that_can_be_shared_is_the_first_device_s():
    with pytest.warns(UnsplitBatchWarning, match="own and calls no layer that works row by row"):
        one, many = trained(NoLayer)
    assert_equal(one, many)


def test_a_model_that_cannot_be_sent_is_trained_by_the_first_device():
    key = functools.cmp_to_key(len)(1.0)

    class Locked(Own):
        def __init__(self):
            super().__init__(inner=dense())

        def loss_of(self, x):
            return ops.mean(ops.square(self.inner(x))) * key.obj

    with pytest.warns(UnsplitBatchWarning, match="own and cannot be sent to the processes"):
        one, many = trained(Locked)
    assert_equal(one, many)


class Keeps(Own):
    def __init__(self):
        super().__init__(inner=dense())
        self.seen = []

    def loss_of(self, x):
        self.seen.append(ops.mean(ops.square(self.inner(x))))
        return self.seen[-1]


def test_a_step_that_keeps_a_tensor_with_its_graph_is_the_first_device_s():
    with pytest.warns(UnsplitBatchWarning, match=r"gradient graph \(keep that of .detach"):
        one, many = trained(Keeps)
    assert_equal(one, many)


class ByProcess(Own):
    def __init__(self):
        super().__init__(inner=dense(), first=os.getpid())

    def loss_of(self, x):
        return ops.mean(ops.square(self.inner(x))) * (2 if os.getpid() == self.first else 1)


@pytest.mark.thorough
def test_code_that_depends_on_the_process_is_refused(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CHECK", "0")  # the check of the first step finds it too
    _, model = both(ByProcess)
    model.compile(optimizer="sgd")
    with pytest.raises(UnsupportedModel, match="uses\na value outside of the model"):
        model.fit(numbers(14, 4), batch_size=7, **QUIET)


class Outside(Own):
    """The rate depends on the process, which is not seen in the logs."""

    def __init__(self):
        super().__init__(inner=dense(), first=os.getpid())

    def train_step(self, x):
        loss = ops.mean(ops.square(self.inner(x)))
        weights = self.trainable_weights
        rate = 0.05 if os.getpid() == self.first else 0.01
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients(loss, weights), strict=True):
                weight.assign(weight - rate * gradient)
        return {"loss": loss}


@pytest.mark.thorough
def test_weights_that_are_updated_otherwise_in_another_process_are_refused():
    _, model = both(Outside)
    model.compile(optimizer="sgd")
    with pytest.raises(UnsupportedModel, match="computed the sum of the weights="):
        model.fit(numbers(70, 4), batch_size=7, **QUIET)


@SHARED
def test_a_step_in_a_script_may_use_torch_and_keras_ops():
    """cloudpickle sends the code of a script with the modules that it may use: `torch.ops` too."""
    script = {"Own": Own, "dense": dense, "torch": torch, "ops": ops, "__name__": "__main__"}
    exec(
        "class Script(Own):\n"
        "    def loss_of(self, x):\n"
        "        return ops.mean(torch.square(self.inner(x)))\n",
        script,
    )
    one, many = trained(lambda: script["Script"](inner=dense()))
    assert_equal(one, many)


class Killed(Own):
    def __init__(self):
        super().__init__(inner=dense(), first=os.getpid(), counter=0)

    def loss_of(self, x):
        self.counter += 1
        if self.counter == 3 and os.getpid() != self.first:
            os.kill(os.getpid(), signal.SIGKILL)
        return ops.mean(ops.square(self.inner(x)))


@pytest.mark.thorough
def test_the_end_of_a_worker_says_that_the_step_may_have_updated_some_variables(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CHECK", "0")  # its step updates nothing
    _, model = both(Killed)
    model.compile(optimizer="sgd")
    with pytest.raises(WorkerDied) as found:
        model.fit(numbers(42, 4), batch_size=7, **QUIET)
    assert "may already have updated some variables" in found.value.__notes__[-1]


def test_release_trains_it_on_one_device_again():
    one, many = both(Vae)
    x = numbers(14, 4)
    for model in (one, many):
        model.compile("adam")
        model.fit(x, batch_size=7, **QUIET)
    lockstep.release(many)
    assert_equal(
        one.fit(x, batch_size=7, **QUIET).history, many.fit(x, batch_size=7, **QUIET).history
    )
    assert_equal(one, many)


class OwnStep(keras.Model):
    """A model with a plain step of its own."""

    def train_step(self, data):
        x, y = data
        loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply(gradients(loss, variables), variables)
        return {"loss": loss.detach()}


def test_a_call_is_proven_once_for_each_form_and_nothing_grows_with_the_steps(monkeypatch):
    proven = []

    def counted(layer, args, kwargs, refused=whole_batch_steps._refused):
        proven.append(layer.name)
        return refused(layer, args, kwargs)

    monkeypatch.setattr(whole_batch_steps, "_refused", counted)
    inputs = keras.Input((5,))
    made = OwnStep(inputs, layers.Dense(2)(layers.Dense(4, activation="tanh")(inputs)))
    made.compile("sgd", "mse")
    lockstep.distribute(made, 2)
    steps = attachment_of(made).session._runner.whole_batch
    sizes = []
    for _ in range(3):
        made.fit(numbers(12, 5), numbers(12, 2), batch_size=4, **QUIET)
        sizes.append((len(proven), len(steps._known), steps._size))
    assert sizes[0][0] > 0
    assert sizes[1:] == sizes[:1] * 2
    lockstep.release(made)


class PenalizedNorm(keras.Model):
    """A step of its own with the gradient of a gradient, through batch normalization."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(5, activation="tanh"),
                layers.BatchNormalization(),
                layers.Dense(1),
            ]
        )

    def call(self, x, training=False):
        return self.inner(x, training=training)

    def train_step(self, data):
        x, y = data
        x = x.clone().requires_grad_(True)
        outputs = self(x, training=True)
        (gradient,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        loss = (outputs - y).square().mean() + (gradient.norm(dim=1) - 1).square().mean()
        self.zero_grad()
        loss.backward()
        gradients = [weight.value.grad for weight in self.trainable_weights]
        with torch.no_grad():
            self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


def test_batch_norm_has_second_derivatives(monkeypatch):
    """The check of the first step would let one device run it."""
    monkeypatch.setenv("LOCKSTEP_CHECK", "0")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(11, 4)), rng.normal(size=(11, 1))

    def build():
        made = PenalizedNorm()
        made.compile(keras.optimizers.SGD(0.05))
        return made

    one, many = both(build)
    options = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}
    assert_equal(one.fit(x, y, **options).history, many.fit(x, y, **options).history)
    assert_equal(one, many)
