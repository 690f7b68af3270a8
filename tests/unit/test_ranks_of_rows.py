"""Layers of Keras that take inputs of a lower rank for one row."""

import keras
import pytest
from keras import layers

from lockstep.engines.rowwise import works_by_rows


def attend(make, shape):
    inputs = keras.Input(shape), keras.Input(shape)
    layer = make()
    layer(list(inputs))
    return layer


@pytest.mark.parametrize("make", [layers.Attention, layers.AdditiveAttention])
def test_attention_takes_a_batch_of_vectors_for_one_sequence(make):
    assert works_by_rows(attend(make, (5, 4)))
    assert not works_by_rows(attend(make, (4,)))


def test_a_mask_of_rank_2_is_that_of_all_rows():
    sequence, of_rows, of_each = keras.Input((3, 4)), keras.Input((3,)), keras.Input((3, 3))
    for mask, by_rows in ((of_each, True), (of_rows, False)):
        layer = layers.MultiHeadAttention(2, 2)
        layer(sequence, sequence, attention_mask=mask)
        assert works_by_rows(layer) == by_rows


def test_a_batch_of_matrices_is_one_image():
    for shape, by_rows in (((4, 4, 3), True), ((4, 3), False)):
        layer = layers.RandomFlip(seed=1)
        layer(keras.Input(shape))
        assert works_by_rows(layer) == by_rows
