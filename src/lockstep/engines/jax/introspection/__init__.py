"""Inspection of the steps of a model, for `verify` and `bench`."""
