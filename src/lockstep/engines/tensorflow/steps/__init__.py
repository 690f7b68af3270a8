"""A step on several replicas: layers, losses, Keras's steps, steps of the user's own."""
