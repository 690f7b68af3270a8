"""Branches of one model on different PyTorch devices, in one process."""
