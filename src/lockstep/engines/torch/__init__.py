"""The PyTorch engine: a process for each device, and one controller."""
