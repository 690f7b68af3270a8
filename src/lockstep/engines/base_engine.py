"""What the engines of all backends have in common."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lockstep.engines import attachments
from lockstep.engines.engine import Profile
from lockstep.layout import Layout


class BaseEngine:
    """The part of an `Engine` that needs no framework."""

    name: str

    def detach(self, model: Any) -> None:
        """Make `model` run on one device again; do nothing if it is not attached."""
        with attachments.alone(model, "release"):
            attachments.detach(model)

    def layout(self, model: Any) -> Layout | None:
        """Return the devices of the layers of `model`, `None` if it has none."""
        attachment = attachments.attachment_of(model)
        return None if attachment is None else attachment.layout

    def attached(self, model: Any) -> tuple[str, ...] | None:
        """Return the devices of `model`, or `None` if it is not attached."""
        return attachments.attached(model)

    def profile(self, *, devices: bool) -> AbstractContextManager[Profile]:
        """Return an empty profile."""
        return nullcontext(Profile())
