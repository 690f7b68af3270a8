"""Checks of the arguments of `lockstep.Checkpoint`."""

from lockstep.errors import CheckpointError


def check_arguments(
    every: str, steps: int | None, seconds: float | None, keep: int, mode: str
) -> None:
    """Raise for invalid arguments about when to save.

    Raises:
        CheckpointError: If an argument is invalid. The message names valid values.
    """
    wrong = None
    if every != "epoch":
        wrong = f"every={every!r} was asked for", 'every="epoch", steps=500 or seconds=600'
    elif steps is not None and seconds is not None:
        wrong = f"steps={steps} and seconds={seconds} were asked for", "one of the two"
    elif steps is not None and not (isinstance(steps, int) and steps >= 1):
        wrong = f"steps={steps!r} was asked for", "a whole number of at least 1"
    elif seconds is not None and not seconds > 0:
        wrong = f"seconds={seconds!r} was asked for", "a number above 0"
    elif not (isinstance(keep, int) and keep >= 1):
        wrong = f"keep={keep!r} was asked for", "a whole number of at least 1"
    elif mode not in ("auto", "min", "max"):
        wrong = f"mode={mode!r} was asked for", '"auto", "min" or "max"'
    if wrong:
        raise CheckpointError(f"{wrong[0]}.\nSay {wrong[1]}.")


def check_kept(monitor: str | None, keep_best: bool, keep_model: bool) -> None:
    """Raise if the best model is requested, and its checkpoint is not kept.

    Raises:
        CheckpointError: If the arguments contradict each other.
    """
    if keep_model and monitor is not None and not keep_best:
        raise CheckpointError(
            f"keep_model=True was asked for, which is the best by monitor={monitor!r}, and "
            "keep_best=False, which lets it go.\nSay keep_best=True, or leave monitor out."
        )
