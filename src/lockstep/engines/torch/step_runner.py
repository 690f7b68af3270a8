"""What a step on several devices needs, whoever has started their processes."""

import functools
import hashlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from lockstep.engines.held_signals import HeldSignals
from lockstep.engines.replicas.first_step import Difference, Recording, Sketches
from lockstep.engines.torch.group import Group
from lockstep.engines.torch.layers import Plan
from lockstep.engines.torch.loss_sharding import LossSharding
from lockstep.engines.torch.model_pickle import Dumped, dump
from lockstep.engines.torch.replica import RandomStreams
from lockstep.engines.torch.row_proofs import ReasonsByNumber, RowProofs
from lockstep.engines.torch.settings import CastsOfAutocast
from lockstep.engines.torch.sharded_updates import check_optimizers
from lockstep.engines.torch.sharded_variables import (
    Shards,
    is_on_host,
    is_sharded,
    shards_in,
    to_shard,
)
from lockstep.engines.torch.split_checks import unsplit_model
from lockstep.engines.torch.whole_batch_steps import WholeBatchSteps
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import counted_steps, stored_value
from lockstep.state import variables_of

Method = TypeVar("Method", bound=Callable[..., Any])


def uninterrupted(method: Method) -> Method:
    """Let signals wait for the end of a call, if the other processes have parts of the model.

    An exception within a call ends them, and their parts.
    """

    @functools.wraps(method)
    def run(self: "StepRunner", *args: Any) -> Any:
        if not self.shards.variables:
            return method(self, *args)
        return HeldSignals(lambda: False).run(lambda: method(self, *args), lambda: None)

    return cast(Method, run)


class StepRunner:
    """Runs the steps of one model on several devices, of which this process has one.

    Args:
        model: The model.
        device: The PyTorch device of this process.

    Attributes:
        distrusted: Why parts of the model run on the global batch although they were proven, by
            their number in `Plan.parts`: they gave other numbers in a first step.
        times_sent: How often the model was sent to workers.
        unchecked: Whether the next step compares everything. Within `epoch`, only the first one
            does, unless code of the user may change the model.
        draws_together: Whether every device draws the random numbers of the global batch.
        losses: How losses and metrics are computed.
        whole_batch: The steps that run on the whole batch, in this process.
        shards: The variables of which each process has a part.
    """

    _plan: Plan

    def __init__(self, model: Any, device: torch.device) -> None:
        self.unchecked = True
        self.draws_together = False
        self._model = model
        self._device = device
        self._streams = RandomStreams()
        self._changes = True
        self.distrusted: dict[int, str] = {}
        self.times_sent = 0
        self._proofs = RowProofs(model)
        self._reasons: ReasonsByNumber = {}
        self._unsplit: str | None = None
        self._draws = 0
        self.shards = Shards()
        self.losses = LossSharding(model)
        self.whole_batch = WholeBatchSteps(model)
        self._bytes_of_step: Dumped | None = None
        self._casts = CastsOfAutocast(device)
        self._age_at_update = 0.0

    @contextmanager
    def epoch(self, *, changes: bool) -> Iterator[None]:
        """Run the steps of one epoch inside the context.

        Args:
            changes: Whether code of the user may change the model between two steps.
        """
        before, self._changes, self.unchecked = self._changes, changes, True
        try:
            yield
        finally:
            self._changes, self.unchecked = before, True

    def unsplit(self, x: Any) -> str | None:
        """Return why one device has to run batches like this one alone, `None` if not."""
        self._bytes_of_step = None
        reasons = self._proofs.reasons(x, self._dumped, unchecked=self.unchecked)
        if self.unchecked or reasons is not self._reasons:
            self._reasons = reasons
            self._unsplit = unsplit_model(self._model, reasons)
        return self._unsplit

    def _check_casts_of_parts(self, kind: str) -> None:
        """Raise if autocast computes with weights from before an update, and nobody has them."""
        age = self._casts.age() if self.shards.variables else 0.0
        if age and age == self._age_at_update:
            raise UnsupportedModel(
                "torch.autocast computes with the weights from before the first update as long as "
                f"it lasts,\nand the state of {self._model.name!r} is sharded: nobody keeps whole "
                "weights.\nGive it cache_enabled=False, or call keras.config.set_dtype_policy."
            )
        if kind == "train":
            self._age_at_update = age

    def step(self, kind: str, data: Any, rows: int) -> Any:
        """Run one step on all devices, and return the logs or predictions.

        `unsplit` has to be called for its batch before.

        Args:
            kind: `"train"`, `"test"` or `"predict"`.
            data: Inputs, targets and sample weights: tensors, or `None`.
            rows: The number of rows of the batch.
        """
        raise NotImplementedError

    def recorded(self, kind: str, data: Any, rows: int) -> tuple[Recording, list[Sketches]]:
        """Run one step on all devices without an update.

        Args:
            kind: `"train"`, `"test"` or `"predict"`.
            data: Inputs, targets and sample weights of a few rows.
            rows: Their number.

        Returns:
            What this replica has computed, and the sketches of each replica that is known here.
        """
        raise NotImplementedError

    def tensors(self) -> list[Any]:
        """Return tensors that the code of the model reaches, those of closures included."""
        try:
            return self._dumped().tensors
        except UnsupportedModel:  # the processes of a launcher need no copy of it
            return []

    def agreed_difference(self, found: Difference | None) -> Difference | None:
        """Return the difference that all processes act on."""
        return found

    @property
    def plan(self) -> Plan:
        """The plan of the last step."""
        return self._plan

    def _planned(self, proven: Collection[int]) -> Plan:
        return Plan(
            self._model, proven, draws_together=self.draws_together, distrusted=self.distrusted
        )

    def unshared(self, batch: Any) -> str | None:
        """Return why `step_on_whole_batch` cannot run this batch, `None` if it can."""
        return "and several processes do not share that"

    def step_on_whole_batch(self, kind: str, batch: Any) -> Any:
        """Run one step on the whole batch on every device, and share the calls of its layers.

        Args:
            kind: `"train"`, `"test"` or `"predict"`.
            batch: Tensors or `None`, in the structure that the step takes.

        Raises:
            UnsupportedModel: If another device has computed other logs.
        """
        raise NotImplementedError

    def recorded_on_whole_batch(self, kind: str, batch: Any) -> Recording:
        """Run one step on the whole batch on every device without an update."""
        raise NotImplementedError

    @property
    def whole_layers(self) -> dict[str, str]:
        """Why every device runs some layers on the whole batch, by name, in the last step."""
        plan = self._plan
        found = {plan.candidates[number].name: reason for number, reason in self._reasons.items()}
        return {plan.parts[n].name: reason for n, reason in self.distrusted.items()} | found

    # -------------------------------------------------------- variables in parts

    def lay_out(self) -> None:
        """Shard the variables that are large and not sharded yet."""
        model = self._model
        found = to_shard(model, self._processes())
        new = [each for each in found if not is_sharded(each) or is_on_host(each)]
        self._check_parts()
        for variable in found:
            if is_sharded(variable) and not is_on_host(variable):
                self._number(stored_value(variable))
        check_optimizers(model)
        if not new:
            return
        self._bytes_of_step = None
        self.shards.group = self._ranks()
        self.shards.take(new, self._dumped().holders)
        self._bytes_of_step = None
        try:
            if self.shards.share_memory(self._dumped().tensors):
                raise UnsupportedModel(
                    f"{model.name!r} holds a tensor of one of its large variables elsewhere too, "
                    "such as in another\nvariable, and sharding would part the two. Read the "
                    'variable where its value is needed, or leave out state="sharded".'
                )
            self._give_parts(found)
        except BaseException:
            self.bring_home(self.shards.new())
            raise
        finally:
            self._bytes_of_step = None
        self.unchecked = True

    def leave_host(self, *, sharded: bool) -> None:
        """Move variables from the host to the device that `lay_out` will not shard.

        Args:
            sharded: Whether it will shard some.
        """
        waiting = [each for each in variables_of(self._model) if is_on_host(each)]
        if waiting:
            kept = to_shard(self._model, self._processes()) if sharded else []
            known = set(map(id, kept))
            self.bring_home([each for each in waiting if id(each) not in known])

    def bring_home(self, variables: list[Any]) -> None:
        """Make sharded variables plain ones again."""
        if variables:
            self._bytes_of_step = None
            self.shards.release(self._dumped().holders, variables)
            self._bytes_of_step = None

    def _processes(self) -> int:
        """Return the number of processes that have parts."""
        raise NotImplementedError

    def _ranks(self) -> Group:
        """Return the processes that have parts."""
        raise NotImplementedError

    def _give_parts(self, found: list[Any]) -> None:
        """Let every process have its parts of new variables.

        Args:
            found: All variables that are sharded.
        """
        raise NotImplementedError

    def _number(self, part: Any) -> int:
        """Return the number of a part in the processes.

        Raises:
            UnsupportedModel: If the processes have dropped it.
        """
        raise NotImplementedError

    def _check_parts(self) -> None:
        """Raise if the model has a variable of which the processes have parts for another one."""
        found = shards_in(variables_of(self._model))
        if any(shards is not self.shards and shards.host is None for shards in found):
            raise UnsupportedModel(
                f"{self._model.name!r} has variables of another model, whose state is sharded.\n"
                "The processes have a part of each for one model.\n"
                "Call lockstep.release on the other one first."
            )

    def _dropped(self) -> UnsupportedModel:
        """Return the error for a part that the processes do not have any more."""
        return UnsupportedModel(
            f"This variable was one of {self._model.name!r} when its state was sharded, and is "
            "not any more:\nthe other processes have dropped their parts, such as those of an "
            "earlier optimizer.\nCopy its value before it leaves the model."
        )

    def _dumped(self) -> Dumped:
        """Return the model as bytes: made at most once in a step."""
        if self._bytes_of_step is None:
            self._bytes_of_step = dump(self._model)
        return self._bytes_of_step

    def _proven(self, plan: Plan) -> list[int]:
        """Return the numbers of the candidates of a plan that work row by row."""
        return [number for number in range(len(plan.candidates)) if number not in self._reasons]

    def _draw_base(self, kind: str) -> bytes:
        """Return what decides the random numbers of the next step, besides those of rank 0.

        It is another one for each step, and a resumed run has that of the run before. It is
        drawn from no state: PyTorch's own also decides the order of shuffled rows.
        """
        self._draws += 1
        number = self._draws
        if kind == "train" and self._model.optimizer is not None:
            number = counted_steps(self._model.optimizer)
        base = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
        base.update(f"{kind} {number}".encode())
        return base.digest()
