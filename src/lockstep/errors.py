"""The errors and warnings that lockstep raises, and their classes.

::

    LockstepError
    ├── DeviceError (ValueError)      what was asked of devices=
    │   ├── DeviceNotFound            more devices, or others, than are here
    │   ├── DuplicateDevice           one device named twice
    │   └── RehearsalTooLate          the backend had already started
    ├── UnsupportedBackend            Keras runs where no engine serves it yet
    ├── UnsupportedKeras              this version of Keras was not checked
    ├── NotAModel (TypeError)         the object is no Keras model
    ├── UnusableData (ValueError)     what verify or fit was given to train on
    ├── TargetNotFound (ValueError)   file.py:function names nothing
    ├── ProcessesDisagree             several processes would not train one model
    ├── LaunchError (ValueError)      lockstep run cannot start what was asked for
    ├── WorkerDied (RuntimeError)     a process of a replica has ended within a call
    ├── BenchFailed                   a process that measured did not end well
    ├── CheckpointError (ValueError)  training cannot be checkpointed, or not be resumed
    │   ├── NotARun                   the folder holds something else
    │   ├── DamagedCheckpoint         what was read is not what was written
    │   ├── NewerCheckpoint           a newer lockstep wrote it
    │   └── CheckpointMismatch        another model, optimizer or data than it was written with
    ├── BusyModel (RuntimeError)      a call of the model is under way
    ├── UnsupportedModel              the engine could not keep this model exact
    ├── LayoutConflict                a variable would need two layouts
    └── OldFileError (ValueError)     an old file cannot be read or rescued
        ├── UnreadableFile            no format known here, or damaged beyond reading
        ├── IncompleteFile            the save that wrote it failed half way
        ├── HostileFile               links out of the file, absurd sizes
        ├── NeedsCode                 a custom or Lambda layer, whose code the user has
        ├── UntranslatableModel       an old architecture that Keras 3 cannot express
        ├── WeightsDoNotFit           the weights are those of another model
        ├── AmbiguousWeights          two different assignments both fit
        ├── OutputMismatch            the rescued model does not give the old outputs
        └── UnsuitableOutput          the output cannot hold what was asked for

    LockstepWarning (UserWarning)
    ├── CheckpointWarning             a save failed, a damaged one was passed over, a slow resume
    ├── UnsplitBatchWarning           exact, but devices repeat work
    ├── DataOnHostWarning             data were to stay on the devices, or be made ready ahead
    └── NothingToDoWarning            an old argument that has no meaning now

Every message says what was wrong with both values, why, and the one thing to do
next, in at most three lines.
"""


class LockstepError(Exception):
    """Any error that lockstep raises on purpose."""


class DeviceError(LockstepError, ValueError):
    """`devices=` cannot be followed."""


class DeviceNotFound(DeviceError):
    """A device was asked for that is not here."""


class DuplicateDevice(DeviceError):
    """One device was asked for twice."""


class RehearsalTooLate(DeviceError):
    """Virtual devices were asked for after the backend had started."""


class UnsupportedBackend(LockstepError):
    """Keras runs on a backend, or in a mode, that no engine serves yet."""


class UnsupportedKeras(LockstepError):
    """The installed Keras is a version that lockstep was not checked with."""


class NotAModel(LockstepError, TypeError):
    """The object handed over is no Keras model that can be trained."""


class UnusableData(LockstepError, ValueError):
    """The data, or the model, handed over cannot be trained on: it has no batch, for example."""


class TargetNotFound(LockstepError, ValueError):
    """What a command was told to run cannot be found or does not fit."""


class ProcessesDisagree(LockstepError):
    """Several processes were started that would not train one model together.

    Attributes:
        left_by: The process that left by an error of its own, `None` where it was not that.
    """

    left_by: int | None = None


class LaunchError(LockstepError, ValueError):
    """`lockstep run` cannot start what was asked for."""


class WorkerDied(LockstepError, RuntimeError):
    """The process of a replica has ended within a call, or before it."""


class BenchFailed(LockstepError):
    """A process that was to measure a model did not end well."""


class CheckpointError(LockstepError, ValueError):
    """Training cannot be checkpointed, or not be resumed, as asked."""


class NotARun(CheckpointError):
    """The folder for checkpoints holds something else."""


class DamagedCheckpoint(CheckpointError):
    """What was read of a checkpoint is not what was written."""


class NewerCheckpoint(CheckpointError):
    """A newer lockstep wrote the checkpoint, in a format that is not known here."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint is of another model, optimizer or data than those that are here."""


class BusyModel(LockstepError, RuntimeError):
    """A model was called, moved or released while a call of it was under way."""


class UnsupportedModel(LockstepError):
    """The engine could not keep this model equal to one device."""


class LayoutConflict(LockstepError):
    """A variable of this model is already laid out in another way."""


class OldFileError(LockstepError, ValueError):
    """An old file cannot be read, or not be rescued as asked."""

    def __str__(self) -> str:
        """The message; names from a file may hold control characters, which are escaped."""
        return printable(super().__str__())


def printable(text: str) -> str:
    r"""A text that a terminal shows and does not obey: control characters are escaped.

    Example:
        >>> printable("dense\x1b[2J")
        'dense\\x1b[2J'
    """
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode()
        for one in text
    )


class UnreadableFile(OldFileError):
    """The file has no format that is known here, or is damaged beyond reading."""


class IncompleteFile(OldFileError):
    """The save that wrote the file failed half way: weights are missing."""


class HostileFile(OldFileError):
    """The file asks for what no honest file needs: links out of it, absurd sizes."""


class NeedsCode(OldFileError):
    """The model has a custom or Lambda layer; only the user has its code."""


class UntranslatableModel(OldFileError):
    """The old architecture has a part that Keras 3 cannot express."""


class WeightsDoNotFit(OldFileError):
    """The weights in the file are not those of the model."""


class AmbiguousWeights(OldFileError):
    """Two different assignments of the weights both fit, and no name decides."""


class OutputMismatch(OldFileError):
    """The rescued model does not give the outputs it should."""


class UnsuitableOutput(OldFileError):
    """The output's format or place cannot hold what was asked for."""


class LockstepWarning(UserWarning):
    """Any warning that lockstep gives on purpose."""


class CheckpointWarning(LockstepWarning):
    """Training goes on, and something about its checkpoints has to be known."""


class UnsplitBatchWarning(LockstepWarning):
    """A ragged batch gave exact results, and the devices repeated work for it."""


class DataOnHostWarning(LockstepWarning):
    """Data were to stay on the devices, or be made ready ahead, and go from the host in turn."""


class NothingToDoWarning(LockstepWarning):
    """An argument of the old `multi_gpu_model` that has no meaning any more."""


class SerialBranchesWarning(LockstepWarning):
    """Layers go to another device and back, so the two devices wait for each other."""
