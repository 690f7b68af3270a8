"""Puts the attachment of an engine on a model, and removes it."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from lockstep.engines.call_guard import CallGuard
from lockstep.training.overrides import MAKERS

ATTACHMENT = "_lockstep"
"""The attribute of a model that holds its attachment."""


class Attachment(Protocol):
    """One model on several devices, by one engine."""

    model: Any
    devices: tuple[str, ...]
    turns: CallGuard

    def check(self) -> None:
        """Raise if this model cannot be attached to these devices."""
        ...

    def take_over(self) -> None:
        """Make the model run on the devices."""
        ...

    def give_back(self) -> None:
        """Undo `take_over`, even if it failed half way."""
        ...


def attachment_of(model: Any) -> Any:
    """Return the attachment of a model, `None` if it is not attached."""
    return vars(model).get(ATTACHMENT)


def mark(model: Any, attachment: Attachment) -> None:
    """Store an attachment on a model."""
    vars(model)[ATTACHMENT] = attachment


def unmark(model: Any) -> None:
    """Remove the attachment from a model."""
    vars(model).pop(ATTACHMENT, None)


Methods = dict[str, Any]


def put_on(model: Any, methods: Methods) -> Methods:
    """Set methods on an instance, and return the attributes of the instance they replace."""
    attributes = vars(model)
    own = {name: attributes[name] for name in methods if name in attributes}
    attributes.update(methods)
    return own


def take_off(model: Any, methods: Methods, own: Methods) -> None:
    """Undo `put_on`, except for methods that were replaced again since."""
    attributes = vars(model)
    for name, method in methods.items():
        if attributes.get(name) is not method:
            continue
        if name in own:
            attributes[name] = own[name]
        else:
            del attributes[name]


def remake_functions(model: Any) -> None:
    """Make the step functions that a model has anew."""
    for maker in MAKERS:
        if getattr(model, maker.removeprefix("make_"), None) is not None:
            getattr(model, maker)(force=True)


def alone(model: Any, name: str) -> AbstractContextManager[None]:
    """Keep an attached model out of all calls inside the context.

    Args:
        model: The model.
        name: The name of the operation in the context, for the message.

    Raises:
        BusyModel: If this thread is in a call of the model, or another one in its `fit`.
    """
    attachment = attachment_of(model)
    return nullcontext() if attachment is None else attachment.turns.alone(name)


def attach(new: Attachment, again: Callable[[Any], Attachment]) -> None:
    """Replace the attachment of a model; on failure restore the old one.

    Args:
        new: The new attachment.
        again: Makes an attachment like the old one, to restore it.
    """
    before = attachment_of(new.model)
    new.check()
    detach(new.model)
    try:
        new.take_over()
    except BaseException:
        new.give_back()
        if before is not None:
            with warnings.catch_warnings(action="ignore"):  # the first attach has warned
                again(before).take_over()
        raise


def detach(model: Any) -> None:
    """Make a model run on one device again; do nothing if it is not attached."""
    attachment = attachment_of(model)
    if attachment is not None:
        attachment.give_back()


def attached(model: Any) -> tuple[str, ...] | None:
    """Return the devices of a model, `None` if it is not attached."""
    attachment = attachment_of(model)
    return None if attachment is None else attachment.devices
