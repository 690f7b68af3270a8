"""Records the attachments that hold a variable."""

import weakref
from typing import Any

from lockstep.core.devices import names_in_words
from lockstep.errors import LayoutConflict

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


def check_shared(attachment: Any, variable: Any) -> None:
    """Raise if another model has laid out a variable in another way.

    Args:
        attachment: The attachment of the model that is to have the variable.
        variable: A Keras variable of the model.
    """
    model, home = attachment.model, attachment.home(variable)
    for other in holders_of(variable):
        if other.model is not model and other.home(variable) != home:
            rule = "A variable has one layout. Give both models the same devices, or call"
            if other.layout == attachment.layout:
                rule = (
                    "A sharded variable can belong to only one model. Keep the state of both "
                    "models replicated, or call"
                )
            raise LayoutConflict(
                f"{model.name!r} cannot be distributed to {_where(attachment)}, because its "
                f"variable {variable.path!r} is shared with {other.model.name!r} on "
                f"{_where(other)}.\n{rule}\nlockstep.release on the other model first."
            )


def _where(attachment: Any) -> str:
    shards = " with state in shards" if attachment.layout.is_sharded else ""
    return names_in_words(attachment.devices) + shards
