"""How a session enters a model and leaves it."""
