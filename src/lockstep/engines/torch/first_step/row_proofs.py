"""Which parts of a model are not known to work row by row, found once for each form of inputs."""

import hashlib
from collections.abc import Callable
from typing import Any

import keras

from lockstep.engines.replicas.first_step import states_of
from lockstep.engines.replicas.object_states import held_in_words
from lockstep.engines.rowwise import refused
from lockstep.engines.torch.same_model.model_copy import copy_of
from lockstep.engines.torch.same_model.model_pickle import Dumped, dump
from lockstep.engines.torch.steps.layers import ReasonsByNumber, ReplicaPlan
from lockstep.engines.torch.steps.scratch import Scratch
from lockstep.errors import UnsupportedModel


class RowProofs:
    """Keeps why candidates of one model are not known to work row by row.

    The code of a copy is followed, so that an attribute that a call changes stays as it is in
    the model.

    Attributes:
        count: The number of candidates, in the last call of `reasons`.
    """

    def __init__(self, model: Any) -> None:
        self.count = 0
        self._model = model
        self._of_model = b""
        self._found: dict[str, ReasonsByNumber] = {}

    def reasons(
        self, x: Any, dumped: Callable[[], Dumped], *, unchecked: bool, draws_together: bool
    ) -> ReasonsByNumber:
        """Return why candidates are refused for inputs of this form.

        Args:
            x: The inputs of a batch.
            dumped: Returns what `model_pickle.dump` returns for the model.
            unchecked: Whether the model may have changed since the last call.
            draws_together: Whether each row has the random numbers of one device.
        """
        form = f"{keras.tree.map_structure(_form, x)} {draws_together}"
        if not unchecked and form in self._found:
            return self._found[form]
        self.count = count = len(ReplicaPlan(self._model).candidates)
        if not count:
            if self._of_model:  # it had some before
                self._of_model, self._found = b"", {}
            return self._found.setdefault(form, {})
        try:
            found = dumped()
        except UnsupportedModel as error:
            reason = str(error).splitlines()[0].partition("devices: ")[2].rstrip(".")
            return dict.fromkeys(range(count), f"it cannot be pickled ({reason})")
        digest = hashlib.sha256(found.layers + found.code).digest()
        if digest != self._of_model:
            self._of_model, self._found = digest, {}
        if form not in self._found:
            self._found[form] = _reasons(copy_of(self._model), x, draws_together)
        return self._found[form]


def _reasons(model: Any, x: Any, draws_together: bool) -> ReasonsByNumber:
    parts = ReplicaPlan(model).candidates
    states = states_of(model)  # functions have the globals of the model itself
    if states.fixed:
        return dict.fromkeys(range(len(parts)), held_in_words(states))
    before = dump(model)
    found: dict[int, str] = {}
    try:
        for training in (True, False):
            options = {"training": training, "draws_together": draws_together}
            found = refused(model, parts, x, scratch=Scratch, **options) | found
        if not dump(model).is_of_same_model(before):
            found = dict.fromkeys(map(id, parts), "a call changes its attributes") | found
    finally:
        states.put_back()
    return {number: found[id(part)] for number, part in enumerate(parts) if id(part) in found}


def _form(leaf: Any) -> Any:
    return None if leaf is None else (tuple(leaf.shape[1:]), leaf.ndim, leaf.dtype)
