"""How steps of one kind run on batches of one form, and why: found once, and looked up after."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import torch

from lockstep.core import micro_batches as refused
from lockstep.core.layout import Layout
from lockstep.core.left_out import LeftOutUsed
from lockstep.core.state import unique
from lockstep.engines.replicas.first_step import (
    Computed,
    FirstSteps,
    can_be_tried,
    check_declared_losses,
    compare,
    distrusted_part,
    form_of,
    is_checked,
    is_guessed,
    known_of_alone,
    watched,
)
from lockstep.engines.replicas.layer_plan import advice_for
from lockstep.engines.replicas.repeated_checks import RepeatedChecks
from lockstep.engines.replicas.sketches import GRADIENT, LOG, OUTPUT, Mismatch
from lockstep.engines.torch.exchange.placement import copies
from lockstep.engines.torch.first_step.first_step import recorded_step, stock_step
from lockstep.engines.torch.first_step.row_proofs import RowProofs
from lockstep.engines.torch.ranks.rank import PlanArguments
from lockstep.engines.torch.ranks.step_runner import StepRunner
from lockstep.engines.torch.ranks.traced_steps import Trace, TracedSteps
from lockstep.engines.torch.sharded.sharded_variables import made_on_host
from lockstep.engines.torch.steps.layers import ReasonsByNumber, ReplicaPlan, copied_states
from lockstep.engines.torch.steps.micro_batches import check_layers
from lockstep.engines.torch.steps.replica import OtherRows
from lockstep.engines.torch.steps.scratch import DRAWS
from lockstep.engines.torch.steps.split_checks import (
    around_operations,
    form_of_rows,
    is_around_operations,
    is_asked_for,
    replaced_class,
    rows_of,
    unpacked,
    unsplit_model,
    why_custom,
)
from lockstep.engines.torch.steps.whole_batch_steps import keeps_graph
from lockstep.errors import UnsplitBatchWarning, UnsupportedModel
from lockstep.keras_compat import is_rematerialized, layers_in, stored_value
from lockstep.processes import process_group
from lockstep.training.build import build, is_ready_for_custom_step, unbuilt
from lockstep.training.probe_helpers import calls_watched

BY_ROWS, ON_WHOLE_BATCH, ALONE, BUILDS = "by rows", "on the whole batch", "alone", "builds"
TRACED = "traced"


@dataclass(frozen=True)
class Route:
    """How steps of one kind run on batches of one form.

    Attributes:
        how: `BY_ROWS`: by all ranks; `ON_WHOLE_BATCH`: they share calls of layers; `ALONE`: by the
            first one; `BUILDS`: by the first one, which makes variables. All processes of a
            launcher run it, and take the first one's values; `TRACED`: by all ranks, as a graph.
        reason: Why not by rows.
        plan: How each rank runs layers and losses by rows.
        trace: The graph.
    """

    how: str
    reason: str = ""
    plan: PlanArguments = ((), (), True, None)
    trace: Trace | None = None


class StepPlans:
    """The routes of one model.

    Args:
        model: The model.
        runner: Runs its steps on all devices.
        layout: How it is laid out.
        adopt: Lays out new variables.
    """

    def __init__(
        self, model: Any, runner: StepRunner, layout: Layout, adopt: Callable[[], None]
    ) -> None:
        self._model = model
        self._runner = runner
        self._is_sharded = layout.is_sharded
        self._most = layout.micro_batch_size
        self._adopt = adopt
        self._size = runner.peers.size
        self._routes: dict[Any, Route] = {}
        self._proofs = RowProofs(model)
        self._reasons: ReasonsByNumber = {}
        self._unsplit: str | None = None
        self._distrusted: dict[int, str] = {}
        self._first_steps = FirstSteps(model)
        self._repeated = RepeatedChecks()
        self._last_of_epochs: list[tuple[Any, Route] | None] = []
        self._around: str | None = None
        self._kind, self._is_first_of_call = "train", False
        self._begun: set[str] = set()
        self._left_unbuilt: dict[str, list[Any]] = {}
        self._unshared: set[str] = set()
        self._traces = TracedSteps(model, runner, layout)
        self._with_left_out: dict[str, str] = {}
        self._warned: set[str] = set()

    def of(self, kind: str, batch: Any) -> Route:
        """Return how a step runs on a batch. Code is compared with one device before.

        Args:
            kind: `"train"`, `"test"` or `"predict"`.
            batch: Tensors or `None`, in the structure that the step takes.
        """
        runner, steps = self._runner, self._repeated.steps[kind]
        steps.number += 1
        self._kind, self._is_first_of_call = kind, steps.number == 1
        around = around_operations()
        if runner.has_changed() or around != self._around:
            self._routes.clear()
        self._around = around
        key = kind, form_of_rows(batch), self._times_sent()
        route = self._routes.get(key)
        try:
            if route is None:
                is_lone = self._size == 1 and self._most is None
                route = Route(ALONE) if is_lone else self._found(kind, batch)
            route = self._traced(kind, batch, route)
            if runner.user_code_between_steps and steps.are_due():
                self._compare_again(kind, batch, route)
        except LeftOutUsed as used:
            self._with_left_out[kind] = used.why
            route = self._alone(used.why)
        if (
            route.how in (BY_ROWS, ALONE) and self._size > 1
        ):  # the user's own step may keep what forbids sharing
            self._routes[key] = route
        if self._last_of_epochs:
            self._last_of_epochs[-1] = batch, route
        return route

    def _traced(self, kind: str, batch: Any, route: Route) -> Route:
        """Return the route of a traced step, if it can be one, or else the given one."""
        kept = kind in self._with_left_out or kind in self._first_steps.alone
        if route.how == BUILDS or self._around is not None or kept or not is_asked_for(self._model):
            return route
        trace, steps = self._traces.of(kind, batch), self._repeated.steps[kind]
        if trace is not None and trace.is_new:
            trace.is_new, steps.agreed = False, steps.number
        return route if trace is None else Route(TRACED, trace=trace)

    def traces_are_lost(self) -> None:
        """Trace anew: the processes do not have the graphs any more."""
        self._traces.lost()

    def begin_call(self, name: str) -> None:
        """Note that a method of the model is called."""
        self._repeated.begin_call(name)
        self._traces.begin_call()

    @contextmanager
    def epoch(self, kind: str, *, changes: bool, own_data: bool, prints: bool) -> Iterator[None]:
        """Run the steps of one epoch inside the context; see `StepRunner.epoch`.

        The weights are compared at its end, and the last step if it runs code of the user's.

        Raises:
            ProcessesDisagree: If several devices compute it differently from one.
        """
        self._last_of_epochs.append(None)
        printed, self._traces.prints = self._traces.prints, prints
        try:
            with self._runner.epoch(changes=changes, own_data=own_data):
                yield
                self._runner.compare_weights()
                last = self._last_of_epochs[-1]
                if last is not None and is_checked() and self._is_guessed(kind):
                    self._runner.has_changed()  # by code after the last step
                    self._compare_again(kind, *last, after=True)
        finally:
            self._last_of_epochs.pop()
            self._traces.prints = printed

    def forget(self, kind: str) -> None:
        """Forget the routes of this kind of step: the model may be compiled differently."""
        self._first_steps.forget(kind)
        self._with_left_out.pop(kind, None)
        self._routes.clear()
        self._traces.forget()

    def _found(self, kind: str, batch: Any) -> Route:
        if kind in self._with_left_out:
            return self._alone(self._with_left_out[kind])
        runner, in_script = self._runner, self._runner.peers.in_script
        if self._is_sharded and (runner.unchecked or self._must_build(kind)):
            with made_on_host(self._size):
                build(self._model, kind, batch)
            self._adopt()
        elif self._must_build(kind):
            if self._most is not None:  # one device would run all rows at once
                build(self._model, kind, batch)
                runner.unchecked = True
                self._adopt()
            elif not in_script or type(self._model).call is keras.Model.call:
                return Route(BUILDS)  # its step alone builds a model without `call`
            else:
                with torch.no_grad():  # each process builds it, and takes the first one's values
                    self._model(keras.utils.unpack_x_y_sample_weight(batch)[0])
                runner.peers.adopt(first=False)
            self.built(kind)
        reason, data, rows = self.split(kind, batch)
        runner.peers.agree_on_plan(reason, sorted(self._reasons))
        if self._most is not None and data is not None:
            together, (proven, *_) = runner.rank.draws_together, self.plan(self._most)
            plan = ReplicaPlan(self._model, proven, draws_together=together)
            check_layers(self._model, plan, self._reasons, self._most, trains=kind == "train")
        if reason is not None:
            return self._on_whole_batch(kind, batch, reason)
        self._compare_first_step(kind, data, rows)
        if kind in self._first_steps.alone:
            return self._alone(self._first_steps.alone[kind])
        return Route(BY_ROWS, plan=self.plan(self._most))

    def split(self, kind: str, batch: Any) -> tuple[str | None, Any, int]:
        """Return why a batch cannot be split, `None` if it can; the batch, and its rows."""
        reason = self._around or why_custom(self._model, kind)
        if reason is not None:
            return reason, None, 0
        data = unpacked(batch)
        reason, rows = rows_of(data[0])
        return reason or self._unsplit_by(data[0]), data, rows

    def _unsplit_by(self, x: Any) -> str | None:
        """Return why one device has to run batches like this one alone, `None` if not."""
        runner = self._runner
        unchecked = runner.unchecked or runner.proofs_are_old
        together = runner.rank.draws_together
        reasons = self._proofs.reasons(
            x, runner.dumped, unchecked=unchecked, draws_together=together
        )
        runner.proofs_are_old = False
        if unchecked or reasons is not self._reasons:
            self._reasons = reasons
            self._unsplit = unsplit_model(self._model, reasons)
        return self._unsplit

    def plan(self, most: int | None) -> PlanArguments:
        """Return how a rank runs the layers and losses of the last batch that was split.

        Args:
            most: The most rows that it runs at once; `None` for all of its rows.
        """
        candidates = range(self._proofs.count)
        proven = tuple(number for number in candidates if number not in self._reasons)
        return proven, tuple(sorted(self._distrusted)), self._runner.losses.by_rows, most

    def _on_whole_batch(self, kind: str, batch: Any, reason: str) -> Route:
        """Return the route of a step that looks at the whole batch."""
        if self._is_sharded or self._most is not None or is_around_operations(reason):
            return self._alone(reason)
        if kind in self._unshared:
            return Route(ALONE, reason)
        unshared = self._why_unshared(batch)
        if unshared is not None:
            return self._alone(reason, unshared)
        self._compare_first_custom_step(kind, batch)
        if kind in self._first_steps.alone:
            return self._alone(self._first_steps.alone[kind])
        return Route(ON_WHOLE_BATCH, reason)

    def _alone(self, *reasons: str) -> Route:
        """Return the route of a step that one device runs, and say why it does.

        Raises:
            UnsupportedModel: If the state is sharded, which one device does not have, or if the
                rows are to run in parts.
        """
        reason = " ".join(reasons)
        if self._most is not None:
            raise refused.runs_alone(self._model, reason, self._most)
        is_own, in_script = _OWN_STEP in reason, self._runner.peers.in_script
        if self._is_sharded:
            on_jax = "write the step for JAX" if is_own else "set KERAS_BACKEND=jax"
            raise UnsupportedModel(
                f"{self._model.name!r} {reason},\nso one device would have to run every batch "
                "alone, and the state is sharded.\n"
                f'Leave out state="sharded", or {on_jax}.'
            )
        who = "every process runs the whole batch" if in_script else _FIRST_ALONE
        remedy = _ON_JAX
        if is_around_operations(reason):
            remedy = "Remove it to have batches split."
        elif is_own and in_script:
            remedy = "Started without a launcher, one process shares its layers over all devices."
        elif is_own:
            remedy = "A step that is written for JAX is split (KERAS_BACKEND=jax)."
        self._warn(f"{self._model.name!r} {reason},\nso {who}", remedy)
        return Route(ALONE, reason)

    # ------------------------------------------------------------ what a step has shown

    def has_other_rows(self, kind: str, found: OtherRows) -> None:
        """Let the first device run steps of this kind: one by rows has failed before its update."""
        self._routes.clear()
        self._with_left_out[kind] = found.why
        route = self._alone(found.why)
        if self._last_of_epochs:
            self._last_of_epochs[-1] = None, route

    def built(self, kind: str) -> None:
        """Note what a step has left unbuilt."""
        self._left_unbuilt[kind] = unbuilt(self._model, kind)

    def ran_by_rows(self) -> None:
        """Say which layers and losses have all rows, after a step by rows."""
        losses = self._runner.losses
        if self._reasons or self._distrusted:
            self._warn_of_whole(self._whole_layers())
        if losses.large:
            self._warn_of_gathered(losses.large)

    def ran_on_whole_batch(self, kind: str, route: Route) -> None:
        """Note whether a step on the whole batch has shared the call of a layer."""
        steps = self._runner.whole_batch
        if steps.shared:
            self._warn_of_whole(steps.whole)
            return  # else all devices have computed the same
        self._unshared.add(kind)
        self._routes.clear()
        self._alone(route.reason, "and calls no layer that works row by row")

    def _whole_layers(self) -> dict[str, str]:
        """Return why every device runs some layers on the whole batch, by name."""
        plan = self._runner.plan
        found = {plan.candidates[number].name: reason for number, reason in self._reasons.items()}
        return {plan.parts[n].name: reason for n, reason in self._distrusted.items()} | found

    def _must_build(self, kind: str) -> bool:
        """Return whether one device has to run the next step, as it makes variables."""
        if why_custom(self._model, kind) is None:
            if not self._runner.unchecked:
                return False
            # What a step has left unbuilt, it does without, such as a `compute_loss` of its own.
            left = set(map(id, self._left_unbuilt.get(kind, [])))
            return any(id(part) not in left for part in unbuilt(self._model, kind))
        # A GAN, say, has no `call` and is never built: the first batch builds its parts.
        first = kind not in self._begun
        self._begun.add(kind)
        return first and not is_ready_for_custom_step(self._model, kind)

    def _compare_first_step(self, kind: str, data: Any, rows: int) -> None:
        """Compare a step of a new form with that of one device, before any update."""
        model, runner = self._model, self._runner
        if not self._first_steps.is_due(kind, self._form(data), lambda: self._is_guessed(kind)):
            return

        def distrust(found: Mismatch) -> str | None:
            self._routes.clear()  # those of other forms trust it
            if self._most is not None and found.kind == OUTPUT:
                raise refused.rows_differ(model, self._most, "outputs", found.distance)
            parts = runner.plan.parts
            part = distrusted_part(found, model, parts, self._distrusted, is_custom=False)
            if part is None and found.kind in (LOG, GRADIENT) and runner.losses.by_rows:
                check_declared_losses(found, model)
                runner.losses.by_rows = False
                return "its losses"
            return part

        self._settle(kind, self._difference(kind, data, rows, self.plan), distrust)

    def _difference(
        self,
        kind: str,
        data: Any,
        rows: int,
        plan: Callable[[int | None], PlanArguments],
        *,
        repeated: bool = False,
    ) -> Callable[[], Mismatch | None]:
        """Return what compares a step by rows with that of one device.

        Args:
            kind: The kind of the step.
            data: The batch.
            rows: Its rows.
            plan: Returns how a rank runs it, given the most rows that it runs at once.
            repeated: See `compare`.
        """
        model, runner, in_parts = self._model, self._runner, self._most is not None
        # A device is to run two parts, and may run one more row than asked for.
        most_alone = None if self._most is None else max(self._most, self._size + 1)
        shards = self._size * (2 if in_parts else 1)
        norms: Any = nullcontext
        if repeated:  # weights may have led to where Keras's own formula has no digits left
            proven, distrusted, *_ = plan(None)
            parts = ReplicaPlan(model, proven, distrusted=distrusted)
            norms = partial(parts.norms_on_one_device, runner.rank.device)
        alone = partial(self._recorded_alone, kind, norms=norms)
        how = {"repeated": repeated, "by_all": runner.peers.in_script}

        def together(some: Any, count: int) -> Computed:
            most = None if self._most is None else min(self._most, -(-count // shards))
            several, sketches = runner.recorded(kind, copies(some), count, plan(most))
            return sketches, several.dtypes

        return lambda: runner.peers.agreed_difference(
            compare(model, data, rows, shards, alone, together, most_alone, **how)
        )

    def _compare_first_custom_step(self, kind: str, batch: Any) -> None:
        """Compare a step of the user's own of a new form with that of one device."""
        model, runner = self._model, self._runner
        if not self._first_steps.is_due(kind, self._form(batch), lambda: True):
            return

        def distrust(found: Mismatch) -> Any:
            self._routes.clear()
            layers = layers_in(model)
            return distrusted_part(
                found, model, layers, runner.whole_batch.distrusted, is_custom=True
            )

        find = self._custom_difference(kind, batch)
        if find is not None:
            self._settle(kind, find, distrust)

    def _custom_difference(
        self, kind: str, batch: Any, *, repeated: bool = False
    ) -> Callable[[], Mismatch | None] | None:
        """Return what compares a step of the user's own with that of one device, if it can be."""
        runner = self._runner
        leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None and leaf.ndim]
        rows = {len(leaf) for leaf in leaves}
        if len(rows) != 1:
            return None
        (count,) = rows
        alone = partial(self._recorded_alone, kind, is_custom=True)

        def together(some: Any, _: int) -> Computed:
            several = runner.recorded_on_whole_batch(kind, copies(some))
            return [several.sketches()], several.dtypes

        return lambda: compare(
            self._model, batch, count, self._size, alone, together, repeated=repeated
        )

    def _settle(self, kind: str, find: Any, distrust: Any) -> None:
        self._first_steps.settle(kind, find, distrust)
        if kind not in self._first_steps.alone:
            steps = self._repeated.steps[kind]
            steps.agreed = steps.number

    def _compare_again(self, kind: str, batch: Any, route: Route, *, after: bool = False) -> None:
        """Compare a step with that of one device, unless it was compared or cannot be tried.

        Args:
            kind: The kind of the step.
            batch: Its batch.
            route: How it runs.
            after: Whether it has run.

        Raises:
            ProcessesDisagree: If they differ.
        """
        model, steps = self._model, self._repeated.steps[kind]
        if not is_checked() or steps.agreed == steps.number or not can_be_tried(model):
            return
        find = None
        if route.how == BY_ROWS:
            data = unpacked(batch)
            rows = rows_of(data[0])[1]
            plan = route.plan[:3]
            find = self._difference(kind, data, rows, lambda most: (*plan, most), repeated=True)
        elif route.how == ON_WHOLE_BATCH:
            find = self._custom_difference(kind, batch, repeated=True)
        elif route.trace is not None:
            find = partial(self._traces.difference, kind, batch, route.trace)
        if find is None:
            return
        found = find()
        if found is not None:
            raise self._repeated.error(kind, model.name, found, after=after)
        steps.agreed = steps.number

    def _is_guessed(self, kind: str) -> bool:
        """Return whether a step runs any code but Keras's own."""
        parts = [self._model] if self._most is not None else ReplicaPlan(self._model).candidates
        return is_guessed(self._model, kind, parts) or self._runner.is_patched()

    def _form(self, data: Any) -> Any:
        """Return what a first step is the first of: workers with other code are compared again."""
        return form_of(data), self._times_sent()

    def _times_sent(self) -> int:
        return min(self._runner.times_sent(), _MOST_SENT)

    def _recorded_alone(
        self, kind: str, data: Any, *, is_custom: bool = False, norms: Any = nullcontext
    ) -> Computed:
        tensors = self._runner.tensors()
        weights = unique([*self._model.variables, *self._model.trainable_variables])
        with copied_states(self._model), self._runner.shards.whole_here(weights), norms():
            one = recorded_step(
                self._model,
                # Keras multiplies sample weights by a mask in place.
                lambda: stock_step(self._model, kind, copies(data)),
                is_custom=is_custom,
                tensors=tensors,
                watch=partial(calls_watched, watched(self._model)) if is_custom else None,
            )
        return [one.sketches()], one.dtypes

    def _why_unshared(self, batch: Any) -> str | None:
        """Return why the devices cannot share a step on the whole batch, `None` if they can."""
        if self._runner.peers.in_script:
            return "and several processes do not share that"
        leaves = keras.tree.flatten(batch)
        if not all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves):
            return "and is given other data than tensors"
        if replaced_class(self._model) is not None:
            return "and another process does not have that method"
        if keeps_graph(self._model):
            return "and keeps a tensor with its gradient graph (keep that of .detach())"
        if self._runner.unchecked:
            try:
                self._runner.dumped()
            except UnsupportedModel as error:
                return "and " + str(error).splitlines()[0].partition("' ")[2].rstrip(".")
        for variable in self._model.variables:
            tensor = stored_value(variable)
            if tensor is not None and (
                tensor._backward_hooks or tensor._post_accumulate_grad_hooks
            ):
                return f"and the hook on the gradient of {variable.path!r} stays in one process"
        # Layers that are computed again in the backward pass would not use shared weights.
        remade = [each.name for each in layers_in(self._model) if is_rematerialized(each)]
        return f"and has {remade[0]!r} made in a RematScope" if remade else None

    # ------------------------------------------------------------ warnings

    def _warn_of_whole(self, layers: dict[str, str]) -> None:
        if layers:
            names = ", ".join(f"{name!r} ({reason})" for name, reason in layers.items())
            what = f"every device runs {names} of {self._model.name!r} on the whole batch"
            self._warn(what, f"{advice_for(layers.values())}{_ON_JAX}", alone=False)

    def _warn_of_gathered(self, large: dict[str, str]) -> None:
        if large:
            names = ", ".join(f"{name!r} ({reason})" for name, reason in large.items())
            what = f"every device gathers the outputs of {self._model.name!r} for {names}"
            self._warn(what, _ON_JAX, alone=False)

    def _warn(self, what: str, remedy: str, *, alone: bool = True) -> None:
        if what not in self._warned and process_group.is_first():
            self._warned.add(what)
            warnings.warn(
                f"On PyTorch {what}.\n{self._known(what, remedy, alone=alone)}",
                UnsplitBatchWarning,
                stacklevel=2,
            )

    def _known(self, what: str, remedy: str, *, alone: bool) -> str:
        """Return what is known of the numbers of a step, and what to do.

        Args:
            what: How the step runs.
            remedy: What to do.
            alone: Whether one device runs it.
        """
        # Steps of the call from before a change were compared with other code, or with none.
        compared = self._is_first_of_call and is_checked() and not self._first_steps.unknown
        if not compared or DRAWS in what:
            return remedy
        if alone or not self._is_guessed(self._kind):
            return known_of_alone(what, remedy)
        # Code of the user's may keep a state that no worker has.
        return f"Its first step agrees with one device. {remedy}"


_MOST_SENT = 4
"""How often steps are compared again because the model was sent anew, at most."""

_FIRST_ALONE = "only the first device runs every batch"
_ON_JAX = "Set KERAS_BACKEND=jax to have it split."
_OWN_STEP = "_step of its own"
"""Is in the reason of a step that the user has written for PyTorch, which JAX does not run."""
