"""Data as users have it: what a checkpoint must not touch, and what it has to notice."""

from keras.src.trainers.data_adapters import get_data_adapter

from lockstep.engines.jax_data import check_data
from tests.checkpoints.data import Batches


class Untouched:
    """Opens a file when it is first asked, say, which processes that are forked later share."""

    def __len__(self):
        return 14

    def __getitem__(self, index):
        raise AssertionError("asked in the process that trains")


def test_data_that_other_processes_read_is_not_asked_here():
    import torch

    loader = torch.utils.data.DataLoader(Untouched(), 7, num_workers=1)

    class Asked(Untouched, Batches):
        pass

    batches = Asked(workers=1, use_multiprocessing=True)
    for data in (loader, batches):
        check_data(get_data_adapter(data), None)
