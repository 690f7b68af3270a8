"""The custom layers of the fixtures, as their users would write them for Keras 3."""

import keras
from keras import ops


class ScaledShift(keras.layers.Layer):
    """y = (x - center) * scale * gain + shift; center is not trained."""

    def __init__(self, gain=1.0, **kwargs):
        super().__init__(**kwargs)
        self.gain = gain

    def build(self, input_shape):
        width = (input_shape[-1],)
        self.center = self.add_weight(shape=width, name="center", trainable=False)
        self.scale = self.add_weight(shape=width, name="scale")
        self.shift = self.add_weight(shape=width, name="shift")

    def call(self, inputs):
        return (inputs - self.center) * self.scale * self.gain + self.shift

    def get_config(self):
        return {**super().get_config(), "gain": self.gain}


class LayerNorm(keras.layers.Layer):
    """Normalisation over the last dim."""

    def __init__(self, epsilon=1e-5, **kwargs):
        super().__init__(**kwargs)
        self.epsilon = epsilon

    def build(self, input_shape):
        self.gamma = self.add_weight(shape=(input_shape[-1],), name="gamma")
        self.beta = self.add_weight(shape=(input_shape[-1],), name="beta")

    def call(self, inputs):
        mean = ops.mean(inputs, axis=-1, keepdims=True)
        variance = ops.mean(ops.square(inputs - mean), axis=-1, keepdims=True)
        return (inputs - mean) / ops.sqrt(variance + self.epsilon) * self.gamma + self.beta

    def get_config(self):
        return {**super().get_config(), "epsilon": self.epsilon}


class MiniSelfAttention(keras.layers.Layer):
    """One head: softmax(q k^T / sqrt(dim)) v, then wo."""

    def __init__(self, dim, **kwargs):
        super().__init__(**kwargs)
        self.dim = dim

    def build(self, input_shape):
        width = input_shape[-1]
        self.wq = self.add_weight(shape=(width, self.dim), name="wq")
        self.wk = self.add_weight(shape=(width, self.dim), name="wk")
        self.wv = self.add_weight(shape=(width, self.dim), name="wv")
        self.wo = self.add_weight(shape=(self.dim, width), name="wo")

    def call(self, inputs):
        q, k, v = (ops.matmul(inputs, w) for w in (self.wq, self.wk, self.wv))
        scores = ops.matmul(q, ops.transpose(k, (0, 2, 1))) / self.dim**0.5
        return ops.matmul(ops.matmul(ops.softmax(scores, axis=-1), v), self.wo)

    def get_config(self):
        return {**super().get_config(), "dim": self.dim}


def lambda_1(x):
    return x[:, :3]


def lambda_2(x):
    return x[:, 3:]
