"""The TensorFlow engine: mirrored variables, and replicas that run each step together."""
