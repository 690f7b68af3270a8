"""Models in the style of the examples on keras.io: losses, steps and metrics of their own."""

import keras
import numpy as np
from keras import layers, ops

from tests.third_party.row import BACKEND, Row, digits

if BACKEND == "jax":
    import jax
elif BACKEND == "tensorflow":
    import tensorflow as tf
else:
    import torch


class CustomStep(keras.Model):
    """A `train_step` in the form of each backend, around `losses_of(data)`.

    Subclasses name their metrics in `trackers`, in the order of what `losses_of` returns;
    the first is the loss. `metrics` leaves out the tracker that `compile` makes.
    """

    def __init__(self, *trackers):
        super().__init__()
        self.trackers = [keras.metrics.Mean(name=name) for name in trackers]
        self.built = True  # each part has an Input of its own, and there is no call

    @property
    def metrics(self):
        return self.trackers

    def losses_of(self, data):
        raise NotImplementedError

    if BACKEND == "jax":

        def _stateless(self, trainable, others, data):
            pairs = [*zip(self.trainable_variables, trainable, strict=True)]
            pairs += zip(self.non_trainable_variables, others, strict=True)
            with keras.StatelessScope(state_mapping=pairs) as scope:
                losses = self.losses_of(data)
            others = [scope.get_current_value(v) for v in self.non_trainable_variables]
            return losses[0], (losses, others)

        def train_step(self, state, data):
            trainable, others, slots, metrics = state
            step = jax.value_and_grad(self._stateless, has_aux=True)
            (_, (losses, others)), gradients = step(trainable, others, data)
            trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
            logs, metrics = _tracked(self.trackers, losses, metrics)
            return logs, (trainable, others, slots, metrics)

    elif BACKEND == "tensorflow":

        def train_step(self, data):
            with tf.GradientTape() as tape:
                losses = self.losses_of(data)
            variables = self.trainable_variables
            gradients = tape.gradient(losses[0], variables)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return _updated(self.trackers, losses)

    else:

        def train_step(self, data):
            self.zero_grad()
            losses = self.losses_of(data)
            losses[0].backward()
            variables = self.trainable_variables
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in variables], variables)
            return _updated(self.trackers, losses)


def _updated(trackers, losses):
    """The logs, on TensorFlow and PyTorch."""
    for tracker, loss in zip(trackers, losses, strict=True):
        tracker.update_state(loss)
    return {tracker.name: tracker.result() for tracker in trackers}


def _tracked(trackers, losses, variables):
    """The logs, and the variables of the metrics after this step, on JAX."""
    logs, after, start = {}, [], 0
    for tracker, loss in zip(trackers, losses, strict=True):
        end = start + len(tracker.variables)
        state = tracker.stateless_update_state(variables[start:end], loss)
        logs[tracker.name] = tracker.stateless_result(state)
        after += state
        start = end
    return logs, after + list(variables[start:])


class VAE(CustomStep):
    def __init__(self, latent=2):
        super().__init__("loss", "reconstruction", "divergence")
        image = keras.Input((8, 8, 1))
        hidden = layers.Conv2D(8, 3, activation="gelu", strides=2, padding="same")(image)
        hidden = layers.Dense(8, activation="gelu")(layers.Flatten()(hidden))
        told = [layers.Dense(latent)(hidden), layers.Dense(latent)(hidden)]
        self.encoder = keras.Model(image, told)
        point = keras.Input((latent,))
        hidden = layers.Reshape((4, 4, 4))(layers.Dense(64, activation="gelu")(point))
        made = layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="sigmoid")(hidden)
        self.decoder = keras.Model(point, made)
        self.seed = keras.random.SeedGenerator(1)

    def losses_of(self, images):
        mean, log_variance = self.encoder(images)
        noise = keras.random.normal(ops.shape(mean), seed=self.seed)
        made = self.decoder(mean + ops.exp(0.5 * log_variance) * noise)
        each = keras.losses.binary_crossentropy(images, made)
        reconstruction = ops.mean(ops.sum(each, axis=(1, 2)))
        divergence = ops.square(mean) + ops.exp(log_variance) - log_variance - 1
        divergence = 0.5 * ops.mean(ops.sum(divergence, axis=1))
        return reconstruction + divergence, reconstruction, divergence


def vae(distribute):
    model = VAE()
    distribute(model)
    model.compile(keras.optimizers.Adam(1e-3))
    images, _ = digits(size=8, channels=1)
    history = model.fit(images, batch_size=8, epochs=2, verbose=0).history
    return history, model.decoder.predict(images[:3, 0, :2, 0], verbose=0)


class SimCLR(CustomStep):
    """Two augmented views of an image are told from the views of the other images of the batch."""

    def __init__(self):
        super().__init__("loss", "accuracy")
        self.augmenter = keras.Sequential(
            [
                keras.Input((16, 16, 3)),
                layers.RandomFlip("horizontal", seed=1),
                layers.RandomTranslation(0.1, 0.1, seed=2),
            ]
        )
        self.encoder = keras.Sequential(
            [
                keras.Input((16, 16, 3)),
                layers.Conv2D(8, 3, strides=2),
                layers.BatchNormalization(),
                layers.Activation("gelu"),
                layers.GlobalAveragePooling2D(),
                layers.Dense(8),
            ]
        )

    def losses_of(self, images):
        views = [self.augmenter(images, training=True) for _ in range(2)]
        one, two = (ops.normalize(self.encoder(view, training=True), axis=1) for view in views)
        scores = ops.matmul(one, ops.transpose(two)) / 0.1
        labels = ops.arange(ops.shape(images)[0])
        losses = [
            keras.losses.sparse_categorical_crossentropy(labels, rows, from_logits=True)
            for rows in (scores, ops.transpose(scores))
        ]
        accuracy = keras.metrics.sparse_categorical_accuracy(labels, scores)
        return ops.mean(losses[0] + losses[1]) / 2, ops.mean(accuracy)


def simclr(distribute):
    model = SimCLR()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
    distribute(model)
    images, _ = digits(size=16)
    return model.fit(images, batch_size=8, epochs=2, verbose=0).history


class CLIP(keras.Model):
    """Images and captions that belong together are found; `compute_loss` sees the whole batch."""

    def __init__(self):
        super().__init__()
        self.image = keras.Sequential(
            [layers.Conv2D(8, 3, strides=2, activation="gelu"), layers.Flatten(), layers.Dense(8)]
        )
        self.text = keras.Sequential(
            [layers.Embedding(40, 8, mask_zero=True), layers.GRU(8), layers.Dense(8)]
        )
        self.image_norm = layers.UnitNormalization()
        self.text_norm = layers.UnitNormalization()
        self.loss_tracker = keras.metrics.Mean(name="clip_loss")
        self.temperature = self.add_weight(name="temperature", initializer="ones")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, x):
        image = self.image_norm(self.image(x["image"]))
        return image, self.text_norm(self.text(x["caption"]))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        image, text = y_pred
        scores = ops.matmul(image, ops.transpose(text)) * ops.exp(self.temperature)
        labels = ops.arange(ops.shape(image)[0])
        losses = [
            keras.losses.sparse_categorical_crossentropy(labels, rows, from_logits=True)
            for rows in (scores, ops.transpose(scores))
        ]
        loss = ops.mean(losses[0] + losses[1]) / 2
        self.loss_tracker.update_state(loss)
        return loss


def clip(distribute):
    model = CLIP()
    model.compile(keras.optimizers.AdamW(1e-3))
    distribute(model)
    images, classes = digits(size=8, channels=1)
    captions = np.random.default_rng(6).integers(1, 40, (10, 5)).astype("int32")
    captions[::2, 3:] = 0
    x = {"image": images, "caption": captions[classes]}
    history = model.fit(x, batch_size=8, epochs=2, verbose=0).history
    return history, model.predict(x, batch_size=8, verbose=0)


class DCGAN(keras.Model):
    """Two networks with an optimizer step each; `compile` makes the metrics."""

    def __init__(self, latent=4):
        super().__init__()
        self.latent = latent
        self.discriminator = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(8, 3, strides=2, padding="same"),
                layers.LeakyReLU(negative_slope=0.2),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        self.generator = keras.Sequential(
            [
                keras.Input((latent,)),
                layers.Dense(4 * 4 * 4),
                layers.Reshape((4, 4, 4)),
                layers.BatchNormalization(),
                layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="sigmoid"),
            ]
        )
        self.seed = keras.random.SeedGenerator(2)
        self.built = True  # `fit` is given images, and `call` noise

    def compile(self, optimizer):
        super().compile(optimizer=optimizer)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.trackers = [keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")]

    @property
    def metrics(self):
        return self.trackers

    def call(self, noise):
        return self.generator(noise)

    def losses_of(self, real):
        rows = ops.shape(real)[0]
        made = self.generator(
            keras.random.normal((rows, self.latent), seed=self.seed), training=True
        )
        ones, zeros = ops.ones((rows, 1)), ops.zeros((rows, 1))
        told_made = self.discriminator(made)
        told_real = self.discriminator(real)
        d_loss = (self.loss_fn(ones, told_real) + self.loss_fn(zeros, told_made)) / 2
        return d_loss, self.loss_fn(ones, told_made)

    def _each(self, of_discriminator, of_generator):
        """For each trainable variable, the gradient of the loss of its own network."""
        own = {id(v) for v in self.discriminator.trainable_variables}
        pairs = zip(self.trainable_variables, of_discriminator, of_generator, strict=True)
        return [d if id(v) in own else g for v, d, g in pairs]

    if BACKEND == "jax":

        def train_step(self, state, real):
            trainable, others, slots, metrics = state

            def losses_of(trainable):
                pairs = [*zip(self.trainable_variables, trainable, strict=True)]
                pairs += zip(self.non_trainable_variables, others, strict=True)
                with keras.StatelessScope(state_mapping=pairs) as scope:
                    losses = self.losses_of(real)
                return losses, [scope.get_current_value(v) for v in self.non_trainable_variables]

            losses, back, others = jax.vjp(losses_of, trainable, has_aux=True)
            one, zero = ops.ones_like(losses[0]), ops.zeros_like(losses[0])
            gradients = self._each(*back((one, zero)), *back((zero, one)))
            trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
            logs, metrics = _tracked(self.trackers, losses, metrics)
            return logs, (trainable, others, slots, metrics)

    elif BACKEND == "tensorflow":

        def train_step(self, real):
            with tf.GradientTape(persistent=True) as tape:
                losses = self.losses_of(real)
            variables = self.trainable_variables
            zero = tf.UnconnectedGradients.ZERO
            both = [tape.gradient(loss, variables, unconnected_gradients=zero) for loss in losses]
            gradients = self._each(*both)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return _updated(self.trackers, losses)

    else:

        def train_step(self, real):
            losses = self.losses_of(real)
            variables = self.trainable_variables
            values = [variable.value for variable in variables]
            options = {"retain_graph": True, "allow_unused": True}
            both = [torch.autograd.grad(loss, values, **options) for loss in losses]
            with torch.no_grad():
                self.optimizer.apply(self._each(*both), variables)
            return _updated(self.trackers, losses)


def dcgan(distribute):
    model = DCGAN()
    distribute(model)
    model.compile(keras.optimizers.Adam(1e-3, beta_1=0.5))
    images, _ = digits(size=8, channels=1)
    history = model.fit(images, batch_size=8, epochs=2, verbose=0).history
    return history, model.predict(images[:5, 0, :4, 0], verbose=0)


def dqn(distribute):
    """A walk in a corridor is learned from replayed steps; a second network gives the targets."""

    def network():
        made = keras.Sequential(
            [keras.Input((8,)), layers.Dense(16, activation="gelu"), layers.Dense(2)]
        )
        made.compile(keras.optimizers.Adam(1e-2), keras.losses.Huber())
        return made

    model, target = distribute(network()), network()
    rng = np.random.default_rng(8)
    real = keras.config.floatx()
    seen, place, memory, losses = np.eye(8, dtype=real), 3, [], []
    for step in range(60):
        if rng.uniform() < 0.5:
            action = int(rng.integers(2))
        else:
            action = int(np.argmax(model.predict_on_batch(seen[place : place + 1])))
        after = max(place - 1, 0) if action == 0 else place + 1
        done = after == 7
        memory.append((place, action, float(done), after, done))
        place = 0 if done else after
        if step % 20 == 0:
            target.set_weights(model.get_weights())
        if step % 4 == 3:
            chosen = rng.integers(0, len(memory), 6)
            states, actions, rewards, nexts, ends = map(
                np.array, zip(*(memory[n] for n in chosen), strict=True)
            )
            best = target.predict_on_batch(seen[nexts]).max(axis=1)
            wanted = np.array(model.predict_on_batch(seen[states]))
            wanted[np.arange(6), actions] = rewards + 0.9 * best * (1 - ends)
            losses.append(model.train_on_batch(seen[states], wanted))
    return losses, [state for state, *_ in memory]


ROWS = {
    "DCGAN": Row(dcgan),
    "VAE": Row(vae),
    "SimCLR": Row(simclr),
    "CLIP": Row(clip),
    "DQN": Row(dqn),
}
