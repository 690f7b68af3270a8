"""The pretended GPUs that `CUDA_VISIBLE_DEVICES` names."""

import os


def version_of_nccl():
    """Return the version of NCCL: that of `PRETENDED_NCCL`."""
    return tuple(map(int, os.environ.get("PRETENDED_NCCL", "2.31.2").split(".")))


def numbers_of_visible():
    """Return the numbers of the GPUs that a process sees, as CUDA reads them.

    `PRETENDED_DEVICES` says how many the machine has, 4 without it. CUDA ignores what follows the
    first name that names none.
    """
    here = [str(number) for number in range(int(os.environ.get("PRETENDED_DEVICES", "4")))]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return here
    found = []
    for name in named.split(","):
        if name.strip() not in here:
            break
        found.append(name.strip())
    return found
