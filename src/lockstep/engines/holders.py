"""Records the attachments that hold a variable."""

import weakref
from typing import Any

_HOLDERS = "_lockstep_holders"


class Holders(weakref.WeakSet[Any]):
    """The attachments that hold a variable; a copy of the variable has none."""

    def __reduce__(self) -> tuple[type["Holders"], tuple[()]]:
        return Holders, ()

    def __deepcopy__(self, memo: object) -> "Holders":
        return Holders()


def holders_of(variable: Any) -> Holders:
    """Return the attachments that hold a Keras variable."""
    attributes = vars(variable)
    holders: Holders | None = attributes.get(_HOLDERS)
    if holders is None:
        holders = attributes[_HOLDERS] = Holders()
    return holders
