"""Data whose batches are made by other processes."""

from typing import Any

from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter


def drawn_elsewhere(adapter: Any) -> bool:
    """Whether a batch that does not come has changed nothing in this process, random states too."""
    # keras/src/trainers/data_adapters/torch_data_loader_adapter.py
    return isinstance(adapter, TorchDataLoaderAdapter) and adapter._dataloader.num_workers > 0
