"""`lockstep doctor`: backend, versions, the one thing to change, and a test of the devices."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.devices import REHEARSE, names_in_words
from lockstep.core.package_versions import install_command, package_version
from lockstep.core.shared_gpu import SHARE_GPU, Version, cannot_share, nccl_version
from lockstep.core.tried_versions import untried
from lockstep.errors import counted
from lockstep.processes.shares import nvidia_gpus
from lockstep.rehearsal import choose_backend

if TYPE_CHECKING:
    from lockstep.core.engine import Engine

PACKAGES = {
    "jax": ("jax", "jaxlib"),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "torch": ("torch",),
}
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")

_PROBE = """
import json
try:
    import lockstep
    from lockstep.engines import current_engine
    found = {"devices": [[device.name, device.kind] for device in current_engine().devices()]}
except Exception as error:
    found = {"failure": f"{type(error).__name__}: {error}".removesuffix(": ")}
print("\\n" + json.dumps(found))
"""


@dataclass(frozen=True)
class Findings:
    """The environment of a script.

    Attributes:
        backend: The backend that a script gets.
        chosen_by: The source of this choice.
        installed: Versions by name of a package, `None` where it is missing.
        devices: Names and kinds of the devices that a script sees, none where it fails.
        failure: The error where no devices could be listed.
        rehearsal: The value of `LOCKSTEP_REHEARSE`, empty where it is not set.
        gpus: NVIDIA GPUs that have a device file.
        visible: The value of `CUDA_VISIBLE_DEVICES`, `None` where it is not set.
        nccl: The version of NCCL, `None` where it is not found or there is no NVIDIA GPU.
        torch_build: What PyTorch was built for, such as `"CUDA 12.8"` or `"CPU"`; `""` where it is
            missing.
    """

    backend: str
    chosen_by: str
    installed: Mapping[str, str | None]
    devices: tuple[tuple[str, str], ...] = ()
    failure: str = ""
    rehearsal: str = ""
    gpus: int = 0
    visible: str | None = None
    nccl: Version | None = None
    torch_build: str = ""

    @property
    def works(self) -> bool:
        """Whether a script can train here."""
        return bool(self.devices)

    def rows(self) -> list[tuple[str, str]]:
        """The table that `lockstep doctor` prints: a label and a value in each row."""
        builds = {"torch": f" ({self.torch_build} build)"} if self.torch_build else {}
        packages = [
            f"{name} {number}{builds.get(name, '')}"
            for name, number in self.installed.items()
            if number
        ]
        names = [name for name, _ in self.devices]
        kinds = ", ".join(dict.fromkeys(kind for _, kind in self.devices))
        return [
            ("backend", f"{self.backend}, from {self.chosen_by}"),
            ("versions", ", ".join([*packages, f"Python {sys.version.split()[0]}"])),
            ("devices", f"{names_in_words(names)} ({kinds})" if names else "none could be listed"),
            ("rehearsal", f"{REHEARSE}={self.rehearsal}" if self.rehearsal else "no"),
            ("CUDA", self._cuda()),
            *([("sharing", self._sharing())] if self.gpus else []),
        ]

    def _sharing(self) -> str:
        problem = cannot_share(self.nccl)
        if problem:
            return f"one GPU cannot be shared as several devices: {problem}"
        version = ".".join(map(str, self.nccl or ()))
        return f"{SHARE_GPU}=2 makes two devices out of one GPU (NCCL {version})"

    def advice(self) -> str:
        """Return the one thing to change, or that nothing has to change.

        A framework that is newer than any that was tried has a line of its own.
        """
        names = PACKAGES.get(self.backend, ())
        version = next(filter(None, map(self.installed.get, names)), "")
        tpus = NO_TPU_YET if any(name.startswith("tpu") for name, _ in self.devices) else ""
        return "\n".join(filter(None, (self._change(), tpus, untried(self.backend, version))))

    def _change(self) -> str:
        gpus = [name for name, _ in self.devices if not name.startswith("cpu")]
        if self.backend in PACKAGES and not any(map(self.installed.get, PACKAGES[self.backend])):
            return (
                f"A script that imports Keras fails: {self.backend} is not installed.\n"
                + self._other_backend()
            )
        if self.backend not in PACKAGES:
            return (
                f"Keras runs on {self.backend}, but lockstep supports only "
                f"{', '.join(PACKAGES)}.\nChange: export KERAS_BACKEND=jax"
            )
        if not self.devices:
            return self.failure
        unused = self.gpus and not gpus and not self.rehearsal and self.visible not in ("", "-1")
        if unused:
            return (
                f"{counted(self.gpus, 'NVIDIA GPU')} found, but {self.backend} does not use "
                f"{'it' if self.gpus == 1 else 'them'}.\n{self._for_gpus()}"
            )
        if len(self.devices) == 1 or len(gpus) == 1:
            return (
                f"Nothing to change. There is one device; to try several, set {REHEARSE}=4 "
                "before Python starts."
            )
        return "Nothing to change."

    def _other_backend(self) -> str:
        if self.backend != "jax" and self.installed.get("jax"):
            return "Change: export KERAS_BACKEND=jax"
        return f"Change: pip install {self.backend}"

    def _for_gpus(self) -> str:
        if self.backend == "jax":
            return f"Change: {install_command('cuda')}"
        if self.backend == "tensorflow":
            return "Change: pip install 'tensorflow[and-cuda]'"
        version = self.installed.get("torch") or ""
        if version.endswith("+cpu") or self.torch_build == "CPU":
            return (
                f"torch {version} is a CPU build.\n"
                "Change: install a CUDA build: https://pytorch.org/get-started/locally"
            )
        return f'To see the reason, run: {sys.executable} -c "import torch; torch.cuda.init()"'

    def _cuda(self) -> str:
        if not self.gpus:
            return "no NVIDIA GPU"
        plugins = [f"{name} {self.installed[name]}" for name in PLUGINS if self.installed.get(name)]
        hidden = [] if self.visible is None else [f"CUDA_VISIBLE_DEVICES={self.visible!r}"]
        return ", ".join([counted(self.gpus, "NVIDIA GPU"), *plugins, *hidden])


def examine(environ: Mapping[str, str]) -> Findings:
    """Examine an environment as a script that starts in it.

    The backend is imported in another process, so that a broken or missing backend is a result
    and not a crash.

    Args:
        environ: The environment of the script.
    """
    backend, chosen_by = choose_backend(environ)
    names = ["keras-lockstep", "keras", *PACKAGES.get(backend, ()), "jax", *PLUGINS]
    installed = {name: package_version(name) for name in dict.fromkeys(names)}
    devices, failure = _probe(environ)
    return Findings(
        backend=backend,
        chosen_by=chosen_by,
        installed=installed,
        devices=devices,
        failure=failure,
        rehearsal=environ.get(REHEARSE, "").strip(),
        gpus=nvidia_gpus(),
        visible=environ.get("CUDA_VISIBLE_DEVICES"),
        nccl=nccl_version() if nvidia_gpus() else None,
        torch_build=_torch_build() if installed.get("torch") else "",
    )


def _torch_build() -> str:
    """Return what PyTorch was built for, from the file in which it notes that."""
    spec = find_spec("torch")  # which does not import it
    if spec is None or spec.origin is None:
        return ""
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    for name, words in (("cuda", "CUDA"), ("hip", "ROCm"), ("xpu", "XPU")):
        found = re.search(rf"^{name}\b[^=\n]*= *['\"]([^'\"]+)", text, re.M)
        if found is not None:
            return f"{words} {found[1]}"
    return "CPU"


def _probe(environ: Mapping[str, str]) -> tuple[tuple[tuple[str, str], ...], str]:
    """The devices that a new process sees, or the error that it met."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE],
        env={"TF_CPP_MIN_LOG_LEVEL": "3", **environ},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        return (), f"Python exited with status {done.returncode} when the backend started."
    found = json.loads(done.stdout.splitlines()[-1])
    return tuple((name, kind) for name, kind in found.get("devices", ())), found.get("failure", "")


def script_environment(chosen: str | None) -> dict[str, str]:
    """The environment of a script, without the default that the command sets for itself.

    Args:
        chosen: The value of `KERAS_BACKEND` before the command started, `None` for none.
    """
    environ = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    return environ if chosen is None else {**environ, "KERAS_BACKEND": chosen}


NO_TPU_YET = (
    "Lockstep has not yet been run on a TPU: its TPU code was tested on CPU devices that pose "
    "as TPUs. Run\nlockstep doctor --devices --train first, and lockstep verify on your model."
)
"""What the command says where TPUs are found."""

VALUES = 2**22
"""Values of a pattern: 16 MiB, more than a device copies in one piece."""

CAUSE_OF_WRONG_PAIRS = (
    "The usual cause is the IOMMU or PCIe ACS, which corrupts direct copies between GPUs.\n"
    "Change: turn both off (BIOS, or iommu=off for the kernel). Until then, training on these "
    "devices is wrong."
)

CopyAndSum = Callable[[Any, str, str], tuple[Any, Any]]
"""Copies integers from one device to another, and sums what both hold.

It is given an array of the host and the names of two devices, and returns the copy and the sum as
the second device has them, as arrays of the host.
"""


def wrong_pairs(exchange: CopyAndSum, devices: Sequence[str], values: int = VALUES) -> list[str]:
    """Copy and sum patterns of bits between every pair of devices, in both directions.

    The results are compared bit for bit with those of the host.

    Args:
        exchange: Copies and sums over two devices.
        devices: The names of the devices.
        values: The number of values in a pattern.

    Returns:
        One sentence for each copy or sum that is wrong.
    """
    import numpy as np

    random = np.random.default_rng(0).integers(0, 2**30, values, dtype="int32")
    # Neighbouring bits that differ, both ways, and bits that have no order.
    patterns = (np.full(values, 0x2AAAAAAA, "int32"), np.full(values, 0x15555555, "int32"), random)
    found = []
    for source, target in permutations(devices, 2):
        for what, factor in (("copy", 1), ("sum", 2)):
            wrong = sum(
                int(np.count_nonzero(exchange(each, source, target)[factor - 1] != each * factor))
                for each in patterns
            )
            if wrong:
                of = f"{wrong:,} of {counted(len(patterns) * values, 'value')}"
                found.append(f"{source} to {target}: {of} of the {what} are wrong.")
    return found


def check_devices(engine: "Engine", *, rehearsed: bool) -> tuple[list[str], str]:
    """Test the devices of an engine.

    On rehearsed devices the test itself is tried as well: with one bit that is flipped on the
    way, it has to find that pair and no other.

    Args:
        engine: The engine of the backend.
        rehearsed: Whether the devices are virtual.

    Returns:
        The sentences on wrong pairs, and a sentence on what was tested.
    """
    here = engine.devices()
    names = [device.name for device in here if device.platform == here[0].platform]
    if len(names) < 2:
        return [], f"{names[0]} is the only device: there is no pair to test."
    values = VALUES // 64 if rehearsed else VALUES
    exchanged = import_module(f"lockstep.engines.{engine.name}.devices").exchanged
    found = wrong_pairs(exchanged, names, values)
    pairs = counted(len(names) * (len(names) - 1) // 2, "pair")
    said = f"{pairs} of devices tested with copies and sums: all results are exact."
    if rehearsed:
        flipped = wrong_pairs(_flipping(exchanged, names[0], names[1]), names, values)
        if [each.split(": ")[0] for each in flipped] != [f"{names[0]} to {names[1]}"]:
            found.append("A flipped bit was not found: the test itself is wrong.")
        said += f" A bit that was flipped from {names[0]} to {names[1]} was found."
    return found, said


def _flipping(exchange: CopyAndSum, source: str, target: str) -> CopyAndSum:
    """Return an exchange that flips one bit of what it copies between two devices."""

    def flipped(values: Any, one: str, other: str) -> tuple[Any, Any]:
        copy, total = exchange(values, one, other)
        if (one, other) == (source, target):
            copy = copy.copy()
            copy[len(copy) // 2] ^= 1
        return copy, total

    return flipped
