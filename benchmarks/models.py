"""The models that the benchmarks train, most from rows of plain numbers to 10 classes."""

import keras
from keras import layers


def mlp() -> keras.Model:
    """Three small dense layers."""
    return keras.Sequential(
        [keras.Input((64,))]
        + [layers.Dense(64, activation="relu") for _ in range(2)]
        + [layers.Dense(10)]
    )


def many() -> keras.Model:
    """Many small variables: a hundred dense layers."""
    return keras.Sequential(
        [keras.Input((64,))]
        + [layers.Dense(16, activation="tanh") for _ in range(100)]
        + [layers.Dense(10)]
    )


def cnn() -> keras.Model:
    """A small convolutional network on 16 by 16 images."""
    return keras.Sequential(
        [keras.Input((256,)), layers.Reshape((16, 16, 1))]
        + [layers.Conv2D(16, 3, padding="same", activation="relu") for _ in range(2)]
        + [layers.GlobalAveragePooling2D(), layers.Dense(10)]
    )


def transformer() -> keras.Model:
    """Two small transformer blocks on 16 tokens."""
    inputs = keras.Input((256,))
    x = layers.Reshape((16, 16))(inputs)
    x = layers.Dense(32)(x)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 16)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(32)(layers.Dense(64, "gelu")(x)))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def words() -> keras.Model:
    """A small language model: 64 tokens, and for each of them a number for 8,192 words."""
    tokens = keras.Input((64,), dtype="int32")
    x = layers.Embedding(WORDS, 32)(tokens)
    x = layers.LayerNormalization()(
        x + layers.MultiHeadAttention(2, 16)(x, x, use_causal_mask=True)
    )
    return keras.Model(tokens, layers.Dense(WORDS)(x))


WORDS = 8192


# ------------------------------------------------- those worth more than one device


def pictures() -> keras.Model:
    """A convolutional network on 32 by 32 pictures, 0.8 million parameters."""
    made = [keras.Input((32, 32, 3))]
    for filters in (32, 64, 128):
        made += [layers.Conv2D(filters, 3, padding="same", activation="relu") for _ in range(2)]
        made += [layers.MaxPooling2D()]
    made += [layers.Flatten(), layers.Dense(256, activation="relu"), layers.Dense(10)]
    return keras.Sequential(made)


def wide() -> keras.Model:
    """Eight dense layers of 2,048 units, 33.6 million parameters."""
    dense = [layers.Dense(2048, activation="relu") for _ in range(8)]
    return keras.Sequential([keras.Input((2048,)), *dense, layers.Dense(10)])


def text(blocks: int = 4, width: int = 256, words: int = 8192) -> keras.Model:
    """A transformer on 128 tokens, 5.4 million parameters as it stands."""
    tokens = keras.Input((128,), dtype="int32")
    places = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(words, width)(tokens) + layers.Embedding(512, width)(places)
    x = layers.LayerNormalization()(x)
    for _ in range(blocks):
        heads = layers.MultiHeadAttention(width // 64, 64)(x, x)
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(heads))
        hidden = layers.Dense(width)(layers.Dense(4 * width, "gelu")(x))
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(hidden))
    return keras.Model(tokens, layers.Dense(10)(x[:, 0]))


def six_blocks() -> keras.Model:
    """The same with six small blocks: to compile it is most of a first step."""
    return text(blocks=6, width=64, words=512)


def bert() -> keras.Model:
    """The same of the size of BERT-base, 108.9 million parameters."""
    return text(blocks=12, width=768, words=30522)


def resnet() -> keras.Model:
    """ResNet-50 on 224 by 224 pictures, with its batch norms, 25.6 million parameters."""
    return keras.applications.ResNet50(weights=None, classifier_activation=None)


def resnet_of_small_pictures() -> keras.Model:
    """The same on 64 by 64 pictures and with ten classes, for the same reason."""
    return keras.applications.ResNet50(
        weights=None, classifier_activation=None, input_shape=(64, 64, 3), classes=10
    )
