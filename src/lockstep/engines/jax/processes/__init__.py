"""Several JAX processes that train one model."""
