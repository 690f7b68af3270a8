"""The conformance cases, written once for the tests and for docs/exactness.md."""

from tests.conformance.cases.fine_tuning import FINE_TUNING
from tests.conformance.cases.layers import LAYERS
from tests.conformance.cases.losses import LOSSES
from tests.conformance.cases.models import MODELS
from tests.conformance.cases.optimizers import OPTIMIZERS
from tests.conformance.cases.sources import SOURCES

FAMILIES = {
    "Models": MODELS,
    "Data": SOURCES,
    "Losses and metrics": LOSSES,
    "Layers": LAYERS,
    "Optimizers, precision, steps": OPTIMIZERS,
    "Fine-tuning": FINE_TUNING,
}
