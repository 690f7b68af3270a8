"""Models of KerasHub with random weights, and vocabularies trained on Python's own source text."""

import argparse
import inspect
import json
import re
from functools import cache

import keras
import keras_hub
import numpy as np
import tokenizers

from tests.third_party.row import DROPOUT, Row, digits, numbers


def bert(distribute):
    """Sentences go in; the tokenizer runs inside `fit`."""
    tokenizer = keras_hub.models.BertTokenizer(vocabulary=_word_pieces(), lowercase=True)
    model = keras_hub.models.BertTextClassifier(
        keras_hub.models.BertBackbone(
            vocabulary_size=tokenizer.vocabulary_size(),
            num_layers=1,
            num_heads=2,
            hidden_dim=16,
            intermediate_dim=32,
            dropout=DROPOUT,
            max_sequence_length=24,
        ),
        num_classes=2,
        dropout=DROPOUT,
        preprocessor=keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=24),
    )
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    distribute(model)
    lines = lines_of_text(22)
    labels = np.array(["self" in line for line in lines], "int32")
    history = model.fit(lines, labels, batch_size=6, epochs=2, verbose=0).history
    return history, model.predict(lines, batch_size=6, verbose=0)


def gpt2(distribute):
    """Trains on text and writes text."""
    vocabulary, merges = byte_pairs("<|endoftext|>")
    tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary=vocabulary, merges=merges)
    model = keras_hub.models.GPT2CausalLM(
        keras_hub.models.GPT2Backbone(
            vocabulary_size=tokenizer.vocabulary_size(),
            num_layers=1,
            num_heads=2,
            hidden_dim=16,
            intermediate_dim=32,
            dropout=DROPOUT,
            max_sequence_length=16,
        ),
        preprocessor=keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=16),
    )
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
        sampler="greedy",
    )
    distribute(model)
    history = model.fit(lines_of_text(22), batch_size=6, epochs=2, verbose=0).history
    return history, model.generate(["def ", "return self", "if"], max_length=12)


def gemma(distribute):
    model = keras_hub.models.GemmaCausalLM(
        keras_hub.models.GemmaBackbone(
            vocabulary_size=40,
            num_layers=1,
            num_query_heads=2,
            num_key_value_heads=1,
            hidden_dim=16,
            intermediate_dim=32,
            head_dim=8,
            dropout=DROPOUT,
        ),
        preprocessor=None,
    )
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    distribute(model)
    tokens, padding = _tokens(22, 12)
    x = {"token_ids": tokens, "padding_mask": padding}
    y, counted = np.roll(tokens, -1, axis=1), np.roll(padding, -1, axis=1)
    return model.fit(x, y, sample_weight=counted, batch_size=6, epochs=2, verbose=0).history


def vit(distribute):
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(16, 16, 3),
        patch_size=4,
        num_layers=1,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=32,
        dropout_rate=DROPOUT,
        attention_dropout=DROPOUT,
    )
    return _classify_digits(distribute, keras_hub.models.ViTImageClassifier(backbone, 10))


def resnet(distribute):
    backbone = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 64],
        stackwise_num_blocks=[1, 1],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
        image_shape=(16, 16, 3),
    )
    return _classify_digits(distribute, keras_hub.models.ResNetImageClassifier(backbone, 10))


def whisper(distribute):
    """The backbone with its own embedding turned round as the head, as for transcription."""
    backbone = keras_hub.models.WhisperBackbone(
        vocabulary_size=30,
        num_layers=1,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        num_mels=8,
        dropout=DROPOUT,
        max_encoder_sequence_length=32,
        max_decoder_sequence_length=12,
    )
    told = backbone.output["decoder_sequence_output"]
    model = keras.Model(backbone.input, backbone.token_embedding(told, reverse=True))
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    distribute(model)
    tokens, padding = _tokens(14, 12, vocabulary=30)
    x = {
        "encoder_features": numbers(14, 32, 8),
        "decoder_token_ids": tokens,
        "decoder_padding_mask": padding,
    }
    y = np.roll(tokens, -1, axis=1)
    return model.fit(x, y, sample_weight=padding, batch_size=6, epochs=2, verbose=0).history


def _classify_digits(distribute, model):
    model.compile(
        keras.optimizers.SGD(0.02, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    distribute(model)
    x, y = digits()
    history = model.fit(x[:30], y[:30], batch_size=8, epochs=2, verbose=0).history
    return history, model.evaluate(x[30:], y[30:], batch_size=8, verbose=0), model.predict(x)


def lines_of_text(count):
    """Lines of Python's own source text."""
    text = inspect.getsource(argparse).splitlines()
    return [line.strip() for line in text if 20 < len(line.strip()) < 60][:count]


def _tokens(rows, length, vocabulary=40):
    """Numbers of tokens, and how many of each row are not padding."""
    rng = np.random.default_rng(4)
    tokens = rng.integers(1, vocabulary, (rows, length)).astype("int32")
    padding = (np.arange(length) < rng.integers(length // 2, length, (rows, 1))).astype("int32")
    return tokens * padding, padding


@cache
def _word_pieces():
    """Letters and the most frequent words, in the same order in every process."""
    text = lines_of_text(200)
    words = re.findall(r"[a-z]+", " ".join(text).lower())
    frequent = sorted(set(words), key=lambda word: (-words.count(word), word))[:100]
    signs = sorted({sign for line in text for sign in line.lower() if not sign.isspace()})
    pieces = [*signs, *(f"##{sign}" for sign in signs), *frequent]
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(pieces)]


@cache
def byte_pairs(*special):
    """Tokens by their number, and how longer ones are put together."""
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(
        lines_of_text(200), vocab_size=300, show_progress=False, special_tokens=[*special]
    )
    learned = json.loads(made.to_str())["model"]
    return learned["vocab"], [" ".join(pair) for pair in learned["merges"]]


ROWS = {
    "KerasHub BERT, text classifier": Row(bert),
    "KerasHub GPT-2, fit and generate": Row(
        gpt2,
        float32="`generate` mixes int32 and int64 indices where JAX has 64 bits",
    ),
    "KerasHub Gemma": Row(gemma, float32="its softmax and its normalisation are float32"),
    "KerasHub ViT, image classifier": Row(vit),
    "KerasHub ResNet, image classifier": Row(resnet),
    "KerasHub Whisper": Row(whisper),
}
