"""Symbolic tensors that behave for a layer like the tensors of its real call.

While the code of a layer is analyzed, it sees symbolic tensors. Keras's code has to know that they
are symbolic, but user code must not: it could take a branch that does not run otherwise. So these
tensors check which code asks. If they cannot answer a question, the layer is not split.
"""

import sys
import threading
from typing import Any

import keras

from lockstep.keras_compat import DTYPES

HERE = threading.local()
"""Has the follower of this thread as `follower`: see `lockstep.engines.rowwise`."""

_OWN = ("keras", "lockstep")
_BETWEEN = ("abc", "jax", "tensorflow", "torch", "typing", "typing_extensions")
_ASKS_IN_PYTHON = ("abc", "typing", "typing_extensions")
_QUERIES = ("is_keras_tensor", "is_tensor")
"""Functions that answer their caller's question about one tensor."""

_READ = "Python reads the value of a tensor"
_MORE = "it calls functions other than Keras layers and keras.ops"

_OPERATORS = ("add", "sub", "mul", "div", "true_divide")
"""Methods of PyTorch's tensors for operators, where the tensor comes first."""


def asked_by_user(depth: int) -> bool:
    """Return whether code that is followed, and not Keras's own, asks.

    Args:
        depth: The number of frames between the one that asks and this function.
    """
    if getattr(HERE, "follower", None) is None:
        return False
    return _package(_askers(sys._getframe(depth))[-1]) not in _OWN


def _askers(frame: Any) -> list[Any]:
    """Return the frames of functions that answer their caller, and of the one that asks them."""
    found = [frame]
    while _package(frame) in _BETWEEN or frame.f_code.co_name in _QUERIES:
        if frame.f_back is None:
            break
        frame = frame.f_back
        found.append(frame)
    return found


def _package(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _mentions(frame: Any, kind: type) -> bool:
    """Return whether code that asks for a class may compare it with that of real tensors."""
    names = frame.f_code.co_names
    values = [*(frame.f_globals.get(name) for name in names), *frame.f_locals.values()]
    classes = [each for value in values for each in (value if type(value) is tuple else (value,))]
    return "Tensor" in names or any(
        isinstance(each, type) and each is not object and issubclass(kind, each) for each in classes
    )


def refuse(reason: str) -> Any:
    """Refuse the layer that is followed, even if its code catches the error."""
    follower = getattr(HERE, "follower", None)
    if follower is None:
        raise TypeError(reason)
    follower.refuse(reason)


def _refused(reason: str) -> Any:
    return lambda *args, **kwargs: refuse(reason)


class FollowedTensor:
    """A symbolic tensor in a call that is followed.

    It is one of Keras for Keras's code. For the user's code it is none, and its dtype is that of
    the tensors in a real call. It must not pass for one of these in their own library, which would
    read its memory: where the class of real tensors is asked for, the layer is refused.

    It is no subclass of `keras.KerasTensor`: `isinstance` would not look at `__class__`.
    """

    __hash__ = object.__hash__
    __bool__ = __float__ = __index__ = __int__ = __iter__ = __len__ = _refused(_READ)
    __array__ = __jax_array__ = __tf_tensor__ = _refused(_MORE)

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> Any:
        """Leave `tensor * self` and the like to the operators of this class."""
        if getattr(func, "__name__", "") in _OPERATORS:
            raise TypeError(func)  # PyTorch makes `NotImplemented` of it
        refuse(_MORE)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        if not asked_by_user(2):
            return keras.KerasTensor
        asker, *others = _askers(sys._getframe(1))
        if any(_package(frame) in _OWN for frame in (asker, *others)):
            return HERE.follower.kind  # for a query of Keras, in Python, about one tensor
        # No error is raised here: code in C that asks would not pass it on.
        if any(_package(frame) not in _ASKS_IN_PYTHON for frame in (asker, *others)[:-1]):
            HERE.follower.fail(_MORE)
        elif others or _mentions(asker, HERE.follower.kind):
            HERE.follower.fail("it asks whether a tensor is symbolic")
        return FollowedTensor

    @property
    def dtype(self) -> Any:
        """The dtype: text for Keras's code, that of the backend for the user's."""
        name = vars(self)[DTYPES[-1]]
        return HERE.follower.dtype(name) if asked_by_user(2) else name

    @property
    def name(self) -> Any:
        """The name, for Keras's code."""
        if asked_by_user(2):
            refuse("it reads 'name' of a tensor")
        return vars(self)["name"]

    def __eq__(self, other: object) -> Any:
        if asked_by_user(2) and (isinstance(other, int | float) or hasattr(other, "shape")):
            return keras.ops.equal(self, other)
        return NotImplemented

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how it is pickled with a layer that keeps it: as text, which nobody uses."""
        return str, ("a symbolic tensor",)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and asked_by_user(2):
            refuse(f"it reads {name!r} of a tensor")
        raise AttributeError(name)


# What Python and Keras's code use, such as operators, is that of Keras.
for _name, _member in vars(keras.KerasTensor).items():
    if _name not in vars(FollowedTensor):
        setattr(FollowedTensor, _name, _member)
FollowedTensor.__name__ = FollowedTensor.__qualname__ = "KerasTensor"


def follow(tensor: Any) -> Any:
    """Turn a symbolic tensor of Keras into one that is followed, in place."""
    if type(tensor) is keras.KerasTensor:
        object.__setattr__(tensor, "__class__", FollowedTensor)
    return tensor
