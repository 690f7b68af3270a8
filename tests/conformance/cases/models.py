"""The zoo's models as cases."""

from functools import partial

from tests.conformance.cases.case import Case, fitted_with
from tests.conformance.zoo import OPTIMIZERS, ZOO


def _compiled(kind, optimizer, dropout, sizes):
    model = kind.build(dropout)
    model.compile(OPTIMIZERS[optimizer](), kind.loss, metrics=kind.metrics)
    return model


MODELS = {
    f"{name.replace('_', ' ')}, {optimizer}": Case(
        partial(_compiled, kind, optimizer, kind.dropout),
        kind.data,
        fitted_with(in_batches=True),
        make_plain=partial(_compiled, kind, optimizer, 0.0),
    )
    for name, kind in ZOO.items()
    for optimizer in kind.optimizers
}
