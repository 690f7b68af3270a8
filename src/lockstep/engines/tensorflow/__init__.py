"""The TensorFlow engine: a copy of the variables on every device, and replicas in lockstep."""
