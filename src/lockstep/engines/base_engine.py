"""What the engines of all backends have in common."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lockstep.engines import attachments
from lockstep.engines.engine import DEFAULT_INPUT, InputOptions, Profile
from lockstep.errors import UnsupportedBackend
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

    def input_options(self, model: Any) -> InputOptions:
        """Return the input options of an attached model."""
        return DEFAULT_INPUT

    def check_no_options(self, options: InputOptions, own_prefetch: str) -> None:
        """Raise if the user gave an input option that only JAX has.

        Args:
            options: The input options.
            own_prefetch: What the backend has in place of `prefetch`, as a sentence.
        """
        if options.data_on_devices:
            raise UnsupportedBackend(
                f"data_on_devices=True was asked for on {self.name!r}, and data stay on the "
                "devices on 'jax' so far.\nLeave it out, or set KERAS_BACKEND=jax before Keras is "
                "imported."
            )
        if options.prefetch:
            raise UnsupportedBackend(
                f"prefetch={options.prefetch} was asked for on {self.name!r}, and lockstep draws "
                f"batches ahead on 'jax' so far.\nLeave it out: {own_prefetch}"
            )
