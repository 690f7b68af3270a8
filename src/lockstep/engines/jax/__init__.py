"""The JAX engine: one program over a mesh that sees the global batch."""
