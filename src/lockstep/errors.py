"""The errors and warnings that lockstep raises, and their classes.

::

    LockstepError
    ├── DeviceError (ValueError)      `devices=`, `state=` or `memory=` is wrong
    │   ├── DeviceNotFound            a device is not available
    │   ├── DuplicateDevice           a device is named twice
    │   └── RehearsalTooLate          the backend had already started
    ├── UnsupportedBackend            there is no engine for the backend or its mode
    ├── UnsupportedKeras              this version of Keras was not checked
    ├── UnsupportedFramework          this JAX, PyTorch or TensorFlow lacks a function
    ├── NotAModel (TypeError)         the object is not a Keras model
    ├── NotACallback (TypeError)      the object is not a Keras callback
    ├── UnusableData (ValueError)     the data or the model cannot be trained on
    ├── TargetNotFound (ValueError)   file.py:function does not exist or does not fit
    ├── ProcessesDisagree             several processes would not train one model
    ├── LaunchError (ValueError)      lockstep run cannot start the processes
    ├── WorkerDied (RuntimeError)     the process of a replica has ended within a call
    ├── BenchFailed                   a process that measures a model has failed
    ├── CheckpointError (ValueError)  training cannot be checkpointed or resumed
    │   ├── NotARun                   the folder is not a folder of checkpoints
    │   ├── DamagedCheckpoint         a file differs from the file that was written
    │   ├── NewerCheckpoint           a newer lockstep wrote the checkpoint
    │   └── CheckpointMismatch        the model, optimizer or data have changed
    ├── PredictionFileError (ValueError)  a file of predictions cannot be begun or continued
    ├── ProfileError (ValueError)     a fit cannot be profiled as requested
    ├── BusyModel (RuntimeError)      a call of the model is running
    ├── UnsupportedModel              the engine cannot keep this model exact
    ├── LayoutConflict                a variable would need two layouts
    └── OldFileError (ValueError)     an old file cannot be read or rescued
        ├── UnreadableFile            the format is unknown, or the file is damaged
        ├── IncompleteFile            the save that wrote the file failed
        ├── HostileFile               the file links to other files, or has implausible sizes
        ├── NeedsCode                 the file has a custom or Lambda layer without its code
        ├── UntranslatableModel       Keras 3 cannot express the architecture
        ├── WeightsDoNotFit           the weights belong to a different model
        ├── AmbiguousWeights          two different assignments both fit
        ├── OutputMismatch            the rescued model does not give the old outputs
        └── UnsuitableOutput          the output cannot be written as requested

    LockstepWarning (UserWarning)
    ├── CheckpointWarning             a save failed, a damaged one was skipped, a resume is slow
    ├── UnsplitBatchWarning           a layer or batch is not split, and devices repeat work
    ├── NotTracedWarning              a step cannot be traced, and runs as Keras's code
    ├── NothingToDoWarning            an argument has no effect
    └── SerialBranchesWarning         two devices wait for each other

Every message gives the two values that differ, the reason, and the one thing to do next, in at
most three lines.
"""


class LockstepError(Exception):
    """The base class of all errors that lockstep raises."""


class DeviceError(LockstepError, ValueError):
    """The value of `devices=`, `state=` or `memory=` is wrong.

    Attributes:
        problem: The message without the remedy of a rehearsal.
        rehearse: The number of virtual devices to rehearse with; `None` if that does not help.
    """

    def __init__(self, problem: str, rehearse: int | None = None) -> None:
        super().__init__(problem, rehearse)
        self.problem, self.rehearse = problem, rehearse

    def __str__(self) -> str:
        """Return the problem, and how to rehearse, if that helps."""
        if self.rehearse is None:
            return self.problem
        return (
            f"{self.problem}\nTo rehearse on virtual CPU devices, set "
            f"LOCKSTEP_REHEARSE={self.rehearse} before Python starts\n(or call "
            f"lockstep.rehearse(devices={self.rehearse}) before the first Keras operation)."
        )


class DeviceNotFound(DeviceError):
    """A requested device is not available."""


class DuplicateDevice(DeviceError):
    """A device was requested twice."""


class RehearsalTooLate(DeviceError):
    """Virtual devices were requested after the backend had started."""


class UnsupportedBackend(LockstepError):
    """There is no engine for the backend of Keras, or for the mode that it runs in."""


class UnsupportedKeras(LockstepError):
    """Lockstep was not checked with the installed version of Keras."""


class UnsupportedFramework(LockstepError):
    """The installed JAX, PyTorch or TensorFlow lacks an internal function that lockstep needs."""


class NotAModel(LockstepError, TypeError):
    """The object is not a Keras model that can be trained."""


class NotACallback(LockstepError, TypeError):
    """The object is neither a Keras callback nor a function that makes one."""


class UnusableData(LockstepError, ValueError):
    """Training with the data or the model is not possible. For example, the data have no batch."""


class TargetNotFound(LockstepError, ValueError):
    """The target of a command does not exist, or does not fit the command."""


class ProcessesDisagree(LockstepError):
    """Several processes would not train one model together.

    Attributes:
        left_by: The process that left the call by an error, or `None` for another cause.
    """

    left_by: int | None = None


class LaunchError(LockstepError, ValueError):
    """`lockstep run` cannot start the processes."""


class WorkerDied(LockstepError, RuntimeError):
    """The process of a replica has ended during a call, or before it."""


class BenchFailed(LockstepError):
    """A process that measures a model has failed."""


class CheckpointError(LockstepError, ValueError):
    """Training cannot be checkpointed or resumed."""


class NotARun(CheckpointError):
    """The folder is not a folder of checkpoints."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint differs from the file that was written."""


class NewerCheckpoint(CheckpointError):
    """A newer lockstep wrote the checkpoint, in an unknown format."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint belongs to a different model, a different optimizer or different data."""


class PredictionFileError(LockstepError, ValueError):
    """A file of predictions cannot be begun, continued or written."""


class ProfileError(LockstepError, ValueError):
    """A `fit` cannot be profiled as requested."""


class BusyModel(LockstepError, RuntimeError):
    """A model was called, moved or released during one of its calls."""


class UnsupportedModel(LockstepError):
    """The engine cannot keep this model equal to one device."""


class LayoutConflict(LockstepError):
    """A variable of this model is already laid out in another way."""


class OldFileError(LockstepError, ValueError):
    """An old file cannot be read or rescued."""

    def __str__(self) -> str:
        """Return the message. Control characters in names from a file are escaped."""
        return printable(super().__str__())


def printable(text: str) -> str:
    r"""Return a text with its control characters escaped, so that a terminal shows them.

    Example:
        >>> printable("dense\x1b[2J")
        'dense\\x1b[2J'
    """
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode()
        for one in text
    )


def counted(number: int, noun: str) -> str:
    """A number and its noun, for a message.

    Args:
        number: How many.
        noun: The regular noun, in the singular.

    Example:
        >>> counted(1, "device"), counted(2, "device"), counted(0, "batch")
        ('1 device', '2 devices', '0 batches')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("s", "x", "tch")) else "s"
    return f"{number:,} {noun}{ending}"


def first_line(error: BaseException, most: int = 160) -> str:
    """Return the first line of what an error says; the name of its class if it says nothing.

    Args:
        error: The error, of any package.
        most: The most characters to return.

    Example:
        >>> first_line(ValueError("no rows" + chr(10) + "at all")), first_line(ValueError())
        ('no rows', 'ValueError')
    """
    lines = str(error).strip().splitlines()
    return lines[0][:most].rstrip() if lines else type(error).__name__


def shown(value: object) -> str:
    """A wrong argument, for a message: a short value as Python writes it, else its type.

    Example:
        >>> shown(2.5), shown(list(range(99)))
        ('2.5', 'a list')
    """
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"a {type(value).__name__}"


class UnreadableFile(OldFileError):
    """The format of the file is unknown, or the file is damaged."""


class IncompleteFile(OldFileError):
    """The save that wrote the file failed, and weights are missing."""


class HostileFile(OldFileError):
    """The file links to other files, or declares implausible sizes."""


class NeedsCode(OldFileError):
    """The model has a custom or Lambda layer; only the user has its code."""


class UntranslatableModel(OldFileError):
    """The old architecture has a part that Keras 3 cannot express."""


class WeightsDoNotFit(OldFileError):
    """The weights in the file do not fit the model."""


class AmbiguousWeights(OldFileError):
    """Two different assignments of the weights both fit, and no name decides."""


class OutputMismatch(OldFileError):
    """The rescued model does not give the expected outputs."""


class UnsuitableOutput(OldFileError):
    """The output cannot be written in this format or to this place."""


class LockstepWarning(UserWarning):
    """The base class of all warnings of lockstep."""


class CheckpointWarning(LockstepWarning):
    """There is a problem with the checkpoints of a run. Training continues."""


class UnsplitBatchWarning(LockstepWarning):
    """A batch was not split. The results are exact, but the devices repeat work."""


class NotTracedWarning(LockstepWarning):
    """`jit_compile=True` was requested on PyTorch, but a step cannot be traced into a graph."""


class NothingToDoWarning(LockstepWarning):
    """An argument of the old `multi_gpu_model` has no effect."""


class SerialBranchesWarning(LockstepWarning):
    """Layers go to another device and back, so the two devices wait for each other."""
