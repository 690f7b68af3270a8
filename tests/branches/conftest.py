"""The warm process that runs the cases of conformance."""

from tests.conformance.conftest import workers as workers
