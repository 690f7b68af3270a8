"""Tests of Keras that cannot apply to a distributed model, each with its reason."""

CANNOT_APPLY: dict[str, str] = {}
