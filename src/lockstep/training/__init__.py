"""The loop of `fit`, `evaluate` and `predict`, which needs no framework."""
