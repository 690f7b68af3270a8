"""A sample of the models of other people; `python -m tests.third_party` has all of them."""

import pytest

from tests.third_party.sample import *  # noqa: F403

pytestmark = pytest.mark.thorough
