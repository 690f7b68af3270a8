"""A row that needs no package but those of the tests, for the default run of each backend."""

from tests.third_party import keras_io
from tests.third_party.row import BOUNDS, compare


def test_a_vae_in_the_style_of_keras_io_trains_as_on_one_device():
    result = compare(keras_io.ROWS["VAE"])
    assert result.weights <= BOUNDS["float64"]
    assert result.rest <= BOUNDS["float64"]
    assert not result.warned
