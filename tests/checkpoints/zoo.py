"""The conformance zoo with each kind of data, as trainings that can be cut."""

from functools import partial

import numpy as np

from tests.checkpoints import data
from tests.conformance.side_by_side import HELD_OUT, ROWS
from tests.conformance.zoo import OPTIMIZERS, ZOO

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

    return {**KINDS[kind](rows), "validation_data": held_out()}


def training(name, kind, optimizer="sgd"):
    """The two, as `runs.train` takes them."""
    return {"make": partial(model, name, optimizer), "source": partial(source, name, kind)}
