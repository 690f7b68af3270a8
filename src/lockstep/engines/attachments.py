"""The one object on a model by which it runs on several devices, put there and taken away."""

import warnings
from collections.abc import Callable
from typing import Any, Protocol

_ATTACHMENT = "_lockstep"


class Attachment(Protocol):
    """One model on some devices, by one engine."""

    model: Any
    devices: tuple[str, ...]

    def check(self) -> None:
        """Raise where this model cannot be attached to these devices."""
        ...

    def take_over(self) -> None:
        """Make the model run on the devices."""
        ...

    def give_back(self) -> None:
        """Undo `take_over`, also where it broke off half way."""
        ...


def attachment_of(model: Any) -> Any:
    """The attachment of a model, `None` where it is not attached."""
    return vars(model).get(_ATTACHMENT)


def mark(model: Any, attachment: Attachment) -> None:
    """Let a model have this attachment."""
    vars(model)[_ATTACHMENT] = attachment


def unmark(model: Any) -> None:
    """Let a model have none."""
    vars(model).pop(_ATTACHMENT, None)


Methods = dict[str, Any]


def put_on(model: Any, methods: Methods) -> Methods:
    """Give one instance these methods; returns those of its own that they stand in for."""
    attributes = vars(model)
    own = {name: attributes[name] for name in methods if name in attributes}
    attributes.update(methods)
    return own


def take_off(model: Any, methods: Methods, own: Methods) -> None:
    """Undo `put_on`, but for a method that another one has been put over since."""
    attributes = vars(model)
    for name, method in methods.items():
        if attributes.get(name) is not method:
            continue
        if name in own:
            attributes[name] = own[name]
        else:
            del attributes[name]


def attach(new: Attachment, again: Callable[[Any], Attachment]) -> None:
    """Put a new attachment in place of the one that a model has, or leave all as it was.

    Args:
        new: The new one.
        again: Makes another one like the old one, which is given back before.
    """
    before = attachment_of(new.model)
    new.check()
    detach(new.model)
    try:
        new.take_over()
    except BaseException:
        new.give_back()
        if before is not None:
            with warnings.catch_warnings(action="ignore"):  # said when it was first attached
                again(before).take_over()
        raise


def detach(model: Any) -> None:
    """Make a model run on one device again; does nothing where it does already."""
    attachment = attachment_of(model)
    if attachment is not None:
        attachment.give_back()


def attached(model: Any) -> tuple[str, ...] | None:
    """The devices a model runs on, `None` where it is not attached."""
    attachment = attachment_of(model)
    return None if attachment is None else attachment.devices
