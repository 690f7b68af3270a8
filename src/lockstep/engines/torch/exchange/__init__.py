"""The device of a rank, and the sums, broadcasts and gathers of tensors between ranks."""
