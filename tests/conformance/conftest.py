"""What several files of this folder use."""

import pytest

from lockstep.engines.jax.steps import steps


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def ahead(request, monkeypatch):
    """Batches drawn in their turn, as on a CPU; and ahead of it, as on an accelerator."""
    monkeypatch.setattr(steps, "looks_ahead", lambda devices: request.param)
    return request.param
