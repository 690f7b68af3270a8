"""The conformance zoo with each kind of data, as trainings that can be cut.

Twenty steps of batches of ten, as the zoo itself is compared with one device: in batches of seven
a last bit in the weights of the subclassed model, whose few units go through dropout and a ReLU to
batch norm, became 6e-4 on the same devices.
"""

from functools import partial

import numpy as np

from tests.checkpoints import data
from tests.conformance.zoo import OPTIMIZERS, ZOO

ROWS = 97
BATCH = 10  # the last one has 7 rows
HELD_OUT = 23
EPOCHS = 2
KINDS = {
    each.__name__: each
    for each in (
        data.arrays,
        data.py_dataset,
        data.tf_data,
        data.torch_loader,
        data.grain_dataset,
        data.generator,
    )
}


def model(name, optimizer="sgd"):
    """The compiled model of that name, with what is random in it."""
    case = ZOO[name]
    made = case.build(case.dropout)
    made.compile(OPTIMIZERS[optimizer](), case.loss, metrics=case.metrics)
    return made


def source(name, kind):
    """What `fit` is given for the model of that name, of that kind of data."""
    case = ZOO[name]

    def held_out():
        return case.data(HELD_OUT, np.random.default_rng(4))

    def rows():
        return case.data(ROWS, np.random.default_rng(3))

    return {**KINDS[kind](rows, BATCH), "validation_data": held_out()}


def training(name, kind, optimizer="sgd"):
    """A training, as `runs.train` takes it."""
    given = partial(source, name, kind)
    return {"make": partial(model, name, optimizer), "source": given, "epochs": EPOCHS}
