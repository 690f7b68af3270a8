"""A placeholder, in a copy of a model, for an attribute that cannot be sent to another process.

A layer may hold a tokenizer, an open file or a lock that no step uses. A copy of the model has
this placeholder instead. Using it raises: the copy would not compute what the model computes.
"""

from typing import Any, ClassVar, NoReturn


class LeftOutUsed(BaseException):
    """Code of a copy has used an attribute that was left out.

    It is no `Exception`, so that a `try` in the code of the user cannot hide it.
    """

    @property
    def why(self) -> str:
        """Why one device has to run the step, as the end of a sentence about its model."""
        return f"uses {self}"


class LeftOut:
    """An attribute that a copy does without.

    Args:
        what: The attribute and its layer, and why it cannot be sent.
    """

    __slots__ = ("_lockstep_what",)

    def __init__(self, what: str) -> None:
        object.__setattr__(self, "_lockstep_what", what)

    def __reduce__(self) -> Any:
        return LeftOut, (self._lockstep_what,)

    def __getattr__(self, name: str) -> NoReturn:
        raise LeftOutUsed(self._lockstep_what)


def _used(self: LeftOut, *args: Any, **kwargs: Any) -> NoReturn:
    raise LeftOutUsed(self._lockstep_what)


_USES = """
call enter exit aenter aexit await iter aiter next anext reversed len bool contains
getitem setitem delitem setattr delattr eq ne lt le gt ge hash
int float complex index array neg pos abs invert round
add sub mul matmul truediv floordiv mod pow divmod and or xor lshift rshift
radd rsub rmul rmatmul rtruediv rfloordiv rmod rpow rand ror rxor
"""
for _name in _USES.split():  # Python finds these in the class, without `__getattr__`
    setattr(LeftOut, f"__{_name}__", _used)


class LeftOutMetric(LeftOut):
    """A metric that only the first process computes. Elsewhere the model has no variables of it."""

    variables: ClassVar[list[Any]] = []
    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("a metric, which only the first process computes")

    def __reduce__(self) -> Any:
        return LeftOutMetric, ()
