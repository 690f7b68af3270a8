"""A sample of the models of other people; `python -m tests.third_party` has all of them."""

from tests.third_party.sample import *  # noqa: F403
