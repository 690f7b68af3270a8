"""The call of a model in parts of its rows, for `micro_batch_size`."""
