"""Train any Keras 3 model on several devices, with the numbers and files of one."""

import os as _os
import typing as _typing

from lockstep import errors as errors
from lockstep.branches.placing import on as on
from lockstep.branches.placing import place as place
from lockstep.branches.placing import placement as placement
from lockstep.core.package_versions import __version__ as __version__
from lockstep.core.process_local import process_local as process_local
from lockstep.core.process_local import split_reading as split_reading
from lockstep.core.status import report_from_environment as _report_from_environment
from lockstep.distribute import devices as devices
from lockstep.distribute import distribute as distribute
from lockstep.distribute import multi_gpu_model as multi_gpu_model
from lockstep.distribute import release as release
from lockstep.distribute import rowwise as rowwise
from lockstep.distribute import sharded as sharded
from lockstep.initialize import initialize as initialize
from lockstep.initialize import join_at_first_use as _join_at_first_use
from lockstep.rehearsal import rehearse as rehearse
from lockstep.rehearsal import rehearse_from_environment as _rehearse_from_environment
from lockstep.rescue.api import inspect as inspect
from lockstep.rescue.api import load_weights as load_weights
from lockstep.rescue.api import rescue as rescue
from lockstep.tools.bench import bench as bench
from lockstep.tools.first_process import first_process as first_process
from lockstep.tools.first_process import is_first as is_first
from lockstep.tools.plan import plan as plan
from lockstep.tools.predict import predict as predict
from lockstep.tools.verify import verify as verify

if _typing.TYPE_CHECKING:
    from lockstep.checkpoint import Checkpoint as Checkpoint
    from lockstep.training.profile import Profile as Profile

__all__ = [
    "Checkpoint",
    "Profile",
    "bench",
    "devices",
    "distribute",
    "errors",
    "first_process",
    "initialize",
    "inspect",
    "is_first",
    "load_weights",
    "multi_gpu_model",
    "on",
    "place",
    "placement",
    "plan",
    "predict",
    "process_local",
    "rehearse",
    "release",
    "rescue",
    "rowwise",
    "sharded",
    "split_reading",
    "verify",
]

_rehearse_from_environment(_os.environ)
_report_from_environment(_os.environ)
_join_at_first_use(_os.environ)


if not _typing.TYPE_CHECKING:  # which would take every name for one that is here

    def __getattr__(name: str) -> object:
        """Keras callbacks are made when asked for: Keras is slow to import."""
        if name == "Checkpoint":
            from lockstep.checkpoint import Checkpoint

            return Checkpoint
        if name == "Profile":
            from lockstep.training.profile import Profile

            return Profile
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
