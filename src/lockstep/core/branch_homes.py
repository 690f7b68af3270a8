"""The device of each variable of a model with layers on several devices."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from lockstep.core.layout import Branches
from lockstep.core.patched import patched
from lockstep.core.state import optimizers_of, rnn_states
from lockstep.keras_compat import ADD_SLOT, layers_in, node_of


def output_device(model: Any, layout: Branches) -> str:
    """Return the device of the first output, which also has metrics and counters."""
    outputs = getattr(model, "outputs", None)
    node = node_of(outputs[0]) if outputs else None
    if node is not None:
        return layout.calls.get(id(node), layout.devices[0])
    return layout.devices[0]


def variable_homes(model: Any, layout: Branches) -> dict[int, str]:
    """Return the device of each variable that has one, by its `id`.

    A variable is on the device of its layer, and an optimizer slot on the device of its variable.
    """
    homes: dict[int, str] = {}
    for layer in reversed(layers_in(model)):
        for variable in [*layer.variables, *rnn_states(layer)]:
            homes.setdefault(id(variable), layout.home(layer))
    for _, optimizer in optimizers_of(model):
        owners = owners_of_slots(optimizer, model.trainable_variables)
        homes |= {slot: homes[id(variable)] for slot, variable in owners.items()}
    return homes


def owners_of_slots(optimizer: Any, trained: Sequence[Any]) -> dict[int, Any]:
    """Return the variable of each optimizer slot that has the shape of one, by the slot's `id`.

    Keras names a slot after its variable, with `_` for `/`. Variables may have the same name. Then
    slots of the same name are in the order of the variables.
    """
    # keras/src/optimizers/base_optimizer.py, BaseOptimizer.add_variable_from_reference
    names = sorted(
        ((variable.path.replace("/", "_"), variable) for variable in trained),
        key=lambda pair: -len(pair[0]),
    )
    found = {}
    earlier: Counter[str] = Counter()
    for slot in optimizer.variables:
        fitting = [
            (name, variable)
            for name, variable in names
            if slot.name.startswith(name) and slot.shape == variable.shape
        ]
        named_alike = [variable for name, variable in fitting if name == fitting[0][0]]
        if named_alike:
            variable = named_alike[earlier[slot.name] % len(named_alike)]
            found[id(slot)] = variable
            earlier[slot.name] += 1
    return found


@contextmanager
def slots_made_at_home(optimizer: Any, home: Callable[[Any], str]) -> Iterator[None]:
    """Make the slots of the optimizer on the devices of their variables inside the context.

    Keras makes all slots on the default device, which need not have the memory for them.

    Args:
        optimizer: An optimizer that is not built.
        home: Returns the device of a variable.
    """
    owner = getattr(optimizer, "inner_optimizer", optimizer)
    make = owner.add_variable_from_reference

    def make_at_home(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        with keras.device(home(reference_variable)):
            return make(reference_variable, *args, **kwargs)

    with patched([(owner, ADD_SLOT, make_at_home)]):
        yield
