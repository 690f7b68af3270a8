"""Each backend has the tests of its pretended GPUs: `test_torch.py` runs on PyTorch alone."""

from tests.conftest import BACKEND

BACKENDS = {"jax", "tensorflow", "torch"}
collect_ignore = [f"test_{backend}.py" for backend in BACKENDS - {BACKEND}]
if BACKEND != "jax":
    collect_ignore += ["test_jax_tpus.py"]
