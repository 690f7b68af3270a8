"""Code that lockstep does not know trains on several devices as on one."""

import json
from dataclasses import asdict

import pytest

from tests.third_party import keras_hub_models, keras_io, recommenders, tools
from tests.third_party.row import BACKEND, BOUNDS, compare

ROWS = {**keras_hub_models.ROWS, **recommenders.ROWS, **tools.ROWS, **keras_io.ROWS}


@pytest.mark.parametrize("name", ROWS)
def test_trains_as_on_one_device(name, request):
    row, folder = ROWS[name], request.config.getoption("--record")
    file = folder and folder / f"{list(ROWS).index(name):02d}.json"
    if file:
        file.unlink(missing_ok=True)  # figures of an earlier run
    result = compare(row)
    bound = BOUNDS[row.precision]
    assert result.weights <= bound, result
    assert result.rest <= bound, result
    if file:
        file.write_text(json.dumps({"name": name, "float32": row.float32, **asdict(result)}))
    expected = row.unsplit.get(BACKEND, "")
    assert bool(result.warned) == bool(expected), result.warned
    assert expected in " ".join(result.warned)
