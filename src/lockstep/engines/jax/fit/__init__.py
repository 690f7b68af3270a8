"""`fit`, `evaluate` and `predict` of a model on a mesh."""
