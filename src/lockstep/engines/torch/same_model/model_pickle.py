"""A model as bytes for the workers: its objects by value, its tensors by number."""

import inspect
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from operator import attrgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar

import keras
import torch

from lockstep.attach.model_pickle import (
    WITH_RULES,
    ModelPickler,
    dumped,
    reason_of,
    trackers_mended,
)
from lockstep.core.left_out import LeftOut, LeftOutMetric
from lockstep.core.travelling_objects import CACHE, reduced
from lockstep.engines.torch.same_model.code_state import (
    CodeReads,
    SetCode,
    claims_other_home,
    contents_of,
    owner_of,
    patches,
    state_of,
    unpatched,
)
from lockstep.engines.torch.same_model.generators import KINDS as GENERATORS
from lockstep.engines.torch.same_model.generators import made_by
from lockstep.engines.torch.same_model.generators import state_of as generator_state
from lockstep.engines.torch.same_model.object_graph import ObjectGraph
from lockstep.engines.torch.sharded.sharded_variables import ShardedVariable
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import (
    COMPILED_METRICS,
    layers_in,
)
from lockstep.training.overrides import is_keras


class Dumped(NamedTuple):
    """A model as bytes.

    Attributes:
        data: The bytes: the same for the same model, whatever the values of its tensors are.
        layers: Those of the model without the metrics of `compile`.
        code: Those of what its code reads from outside of it.
        tensors: The tensors that they name by their number.
        reads: What code of the model reads from outside of it.
        in_modules: Whether attributes of the user's modules hold some of the tensors.
        has_metrics: Whether the bytes have the metrics of `compile`, if there are any.
        holders: The dicts by which layers give their tensors to PyTorch.
        generators: The generators of random numbers that the bytes name by their number.
        states: Their states.
        is_patched: Whether a script has replaced code of a package that the model uses.
        graph: The objects that the bytes were made of, if all of their state is seen.
    """

    data: bytes
    layers: bytes
    code: bytes
    tensors: list[Any]
    reads: CodeReads
    in_modules: bool
    has_metrics: bool
    holders: list[Any]
    generators: list[Any]
    states: list[bytes]
    is_patched: bool
    graph: ObjectGraph | None = None

    def is_still(self) -> bool:
        """Return whether the model would have the same bytes now, if this is known."""
        return self.graph is not None and self.graph.is_same()

    def is_of_same_model(self, other: "Dumped") -> bool:
        """Return whether no attribute differs in another one, and no generator has drawn."""
        return self.data == other.data and self.states == other.states


def dump(model: Any, *, with_graph: bool = False) -> Dumped:
    """Return the bytes of a model, with what its code reads from outside of it.

    In place of an attribute that cannot be pickled, they have a `LeftOut`.

    Args:
        model: The model.
        with_graph: Whether to note the objects that it consists of.

    Raises:
        UnsupportedModel: If the class of a layer, say, cannot be pickled.
    """
    try:
        pickler = pickled(model, _Pickler)
    except Exception as error:
        raise UnsupportedModel(
            f"{model.name!r} cannot be sent to the processes of its devices: "
            f"{_holder(model)}{_name_of(model)}{reason_of(error)}.\nWith several processes, the "
            "globals and closures of a model cannot hold files, threads, data sets and similar "
            "objects.\nMake them attributes of a layer, or do not use them in the model."
        ) from error
    return Dumped(
        pickler.file.getvalue(),
        pickler.layers,
        pickler.code,
        pickler.tensors,
        pickler.reads,
        pickler.in_modules,
        pickler.has_metrics,
        pickler.holders,
        pickler.generators,
        list(map(generator_state, pickler.generators)),
        pickler.is_patched,
        pickler.graph() if with_graph else None,
    )


def load(data: bytes, code: SetCode) -> tuple[Any, list[Any], list[Any]]:
    """Return the model, new tensors for the numbers in the bytes, and generators likewise.

    The tensors and the generators have no state yet.

    Only the process of a worker may do this: classes and functions of the user are made anew.

    Args:
        data: The bytes that `dump` has returned in another process.
        code: The attributes of modules and classes that the process has set.
    """
    unpickler = TensorUnpickler(io.BytesIO(data))
    model = trackers_mended(unpickler.load())
    vars(model)[COMPILED_METRICS] = unpickler.load()
    code.apply(*unpickler.load())
    tensors = [unpickler.tensors[number] for number in range(len(unpickler.tensors))]
    generators = [unpickler.generators[number] for number in range(len(unpickler.generators))]
    return model, tensors, generators


def _name_of(model: Any) -> str:
    """Return the name in the code of a model whose value cannot be pickled, for a message."""
    pickler = _Pickler(io.BytesIO())
    with suppress(Exception):
        pickler.dump(model)
    code = (type, FunctionType, ModuleType, keras.layers.Layer)
    found = pickler.reads.last(lambda value: not isinstance(value, code) and not _travels(value))
    if found is None:
        return ""
    name, value = found
    kind = type(value).__qualname__
    if name == "cell_contents":
        return f"a closure of its code has an object of {kind}: "
    return f"its code reads {name!r}, an object of {kind}: "


def _holder(model: Any) -> str:
    """Return the layer whose class cannot be pickled, for a message."""
    for layer in reversed(layers_in(model)):
        if not _travels(type(layer)):
            return f"{type(layer).__name__}, the class of {layer.name!r}: "
    return ""


def _travels(item: Any) -> bool:
    try:
        dumped(item, TensorPickler)
    except Exception:
        return False
    return True


class TensorPickler(ModelPickler):
    """Pickles tensors by number.

    Args:
        file: The file.
        left_out: By the identity of a layer, what stands for some of its attributes.

    Attributes:
        tensors: The tensors, in the order of their numbers.
        holders: The dicts by which layers give their tensors to PyTorch.
    """

    def __init__(self, file: io.BytesIO, left_out: "_LeftOutOf | None" = None) -> None:
        super().__init__(file)
        self.tensors: list[Any] = []
        self.holders: list[Any] = []
        self._storages: dict[int, int] = {}
        self._left_out = left_out or {}

    def state(self, item: Any) -> dict[str, Any]:
        """Return the attributes of a Keras object, as far as they can be pickled."""
        return super().state(item) | self._left_out.get(id(item), {})

    def reducer_override(self, item: Any) -> Any:
        """Return how one object is pickled."""
        if isinstance(item, torch.Tensor):
            return tensor_of, self._described(item)
        if isinstance(item, ShardedVariable):
            return object.__new__, (type(item),), vars(item)
        if isinstance(item, torch.Generator):
            return _generator, (item.device.type, item.get_state().numpy().tobytes())
        if isinstance(item, torch.nn.ParameterList | torch.nn.ParameterDict):
            if isinstance(item, torch.nn.ParameterDict):
                self.holders.append(item)
            # A layer has one for its weights, and the mode of a step is sent with the step.
            return object.__new__, (type(item),), {**vars(item), "training": True}
        return super().reducer_override(item)

    def _described(self, item: Any) -> tuple[Any, ...]:
        parameter = isinstance(item, torch.nn.Parameter)
        # "cuda" is the current device of each process.
        form = tuple(item.shape), item.dtype, item.device.type, item.requires_grad, parameter
        if item.is_meta:  # Keras learns shapes with such tensors, and a layer may keep one
            return None, None, *form
        number = len(self.tensors)
        self.tensors.append(item)
        place = item.untyped_storage().data_ptr()
        first = self._storages.setdefault(place, number) if place else number
        if first != number and not _is_reshaped(item, self.tensors[first]):
            raise ValueError("two of its tensors share their memory")
        return number, first, *form


_LeftOutOf = dict[int, dict[str, LeftOut]]

Pickler = TypeVar("Pickler", bound=TensorPickler)


def pickled(model: Any, pickler: type[Pickler]) -> Pickler:
    """Return a pickler that has pickled a model, without attributes that cannot be pickled."""
    try:
        return dumped(model, pickler)
    except Exception:
        left_out = _left_out_of(model)
        if not left_out:
            raise
        return dumped(model, partial(pickler, left_out=left_out))


def _left_out_of(model: Any) -> _LeftOutOf:
    """Return what stands for attributes that cannot be pickled, of all layers that it reaches."""
    layers = {id(model): model}
    waiting = [model]
    found: _LeftOutOf = {}
    while waiting:
        layer = waiting.pop()
        for name, value in ModelPickler(io.BytesIO()).state(layer).items():
            try:
                pickler = dumped(value, _AttributePickler)
            except Exception as error:
                what = f"{name} of {layer.name!r}, which cannot be pickled: {reason_of(error)}"
                found.setdefault(id(layer), {})[name] = LeftOut(what)
            else:
                waiting += [each for key, each in pickler.layers.items() if key not in layers]
                layers |= pickler.layers
    return found


class _AttributePickler(TensorPickler):
    """Pickles one attribute, and not the layers that it holds.

    Attributes:
        layers: The layers, by their identity.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.layers: dict[int, Any] = {}

    def persistent_id(self, item: Any) -> int | None:
        """Return a number for a layer."""
        if not isinstance(item, keras.layers.Layer):
            return None
        self.layers[id(item)] = item
        return id(item)


class _Pickler(TensorPickler):
    """Pickles a model for a worker, and after it what its code reads from outside of it."""

    def __init__(self, file: io.BytesIO, left_out: _LeftOutOf | None = None) -> None:
        super().__init__(file, left_out)
        self.reads = CodeReads()
        self.in_modules = False
        self.generators: list[Any] = []
        self.has_metrics = True
        self.layers = self.code = b""
        self.is_patched = False
        self._modules: set[str] = set()
        self._code: list[CodeType] = []
        self._by_value: list[Any] = []

    def dump(self, item: Any) -> None:
        """Pickle a model, and after it the state of its code."""
        self._model = item
        self._metrics: Any = None
        super().dump(item)
        self.layers = self.file.getvalue()
        super().dump(self._metrics)
        self.has_metrics = not isinstance(self._metrics, LeftOutMetric)
        patched, self.is_patched = patches(self._modules)
        state = state_of(self._modules, self._code, _travels)
        for place, values in state.items():
            owner = owner_of(place)
            now = {name: vars(owner)[name] for name in values}
            self.reads.add(owner if place[1] else vars(owner), now)
        before, start = len(self.tensors), self.file.tell()
        super().dump((state, patched))
        self.code = self.file.getvalue()[start:]
        self.in_modules = len(self.tensors) > before

    def graph(self) -> ObjectGraph | None:
        """Return the objects that were pickled, if all is seen that the bytes depend on."""
        packages = unpatched(self._modules)
        if packages is None or self._left_out or self.generators or not self.has_metrics:
            return None
        met = [item for _, item in self.memo.copy().values()]
        graph = ObjectGraph(met, self._by_value, self.reads.names(), packages)
        return graph if graph.is_complete else None

    def reducer_override(self, item: Any) -> Any:
        """Return how one object is pickled, and note what its code reads."""
        kind: Any = type(item)
        if kind is OrderedDict and not item and not vars(item):  # a module has twelve, for hooks
            return OrderedDict, ()
        if _is_pickled_as_usual(kind):
            return NotImplemented
        made = made_by(item)
        if made is not None and reduced(item) is NotImplemented:
            self.generators.append(item)
            return generator_of, (len(self.generators) - 1, *made)
        if isinstance(item, CACHE):
            self._modules.add(item.__module__)
        made = reduced(item)
        if made is not NotImplemented:
            return made
        if isinstance(item, FunctionType) and claims_other_home(item):
            made = self._dynamic_function_reduce(item)  # cloudpickle: by value
        else:
            made = super().reducer_override(item)
        by_value = isinstance(made, tuple) and len(made) == 6
        self._by_value += [item] if by_value else []
        if isinstance(item, FunctionType) and by_value:
            self._code.append(item.__code__)
            self.reads.add(item.__globals__, made[2][1]["__globals__"])
            for cell in item.__closure__ or ():
                self.reads.add(cell, contents_of(cell))
        elif isinstance(item, type) and by_value:
            self.reads.add(item, {n: v for n, v in made[2][0].items() if not n.startswith("__")})
        elif isinstance(item, ModuleType):
            self._modules.add(item.__name__)
        elif isinstance(item, FunctionType | type):
            self._modules.update(map(_MODULE, (*getattr(item, "__mro__", ()), item)))
        return made

    def state(self, item: Any) -> dict[str, Any]:
        """Return the attributes of a Keras object that a worker needs."""
        state = super().state(item)
        self.reads.watch(item)
        if item is self._model:
            self._metrics = state.pop(COMPILED_METRICS, None)
            if isinstance(self._metrics, LeftOut) and _has_keras_steps(item):
                self._metrics = LeftOutMetric()  # the metrics, which rank 0 alone computes
        return state


@cache
def _is_pickled_as_usual(kind: type) -> bool:
    """Return whether no pickler here has a rule for objects of a class, such as a dict of hooks."""
    return not issubclass(kind, (*_TENSORS, *WITH_RULES))


_MODULE = attrgetter("__module__")
_TENSORS = (
    ShardedVariable,
    torch.Tensor,
    torch.nn.ParameterList,
    torch.nn.ParameterDict,
    *GENERATORS,
)


def _has_keras_steps(model: Any) -> bool:
    """Return whether no code of the user's own may read the metrics in a step."""
    return is_keras(model, "train_step") and is_keras(model, "test_step")


def _is_reshaped(tensor: Any, other: Any) -> bool:
    """Return whether two tensors of one memory have the same numbers, in another shape.

    An adapted `Normalization` has its mean as a variable, and in the shape of its inputs.
    """
    same = tensor.dtype == other.dtype and tensor.data_ptr() == other.data_ptr()
    both = tensor.is_contiguous() and other.is_contiguous()
    return bool(same and both and tensor.numel() == other.numel())


def _generator(device: str, state: bytes) -> Any:
    made = torch.Generator(device)
    made.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return made


def tensor_of(*described: Any) -> Any:
    """Name a tensor in the bytes of a model: `TensorUnpickler` calls its own method instead."""
    raise pickle.UnpicklingError("the bytes of a model are read by `load` alone")


def generator_of(*described: Any) -> Any:
    """Name a generator in the bytes of a model, as `tensor_of` names a tensor."""
    raise pickle.UnpicklingError("the bytes of a model are read by `load` alone")


class TensorUnpickler(pickle.Unpickler):
    """Makes the tensors of a pickle anew.

    Attributes:
        tensors: The tensors, by their numbers.
        generators: The generators of random numbers, by their numbers.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.tensors: dict[int, Any] = {}
        self.generators: dict[int, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name in the bytes stands for."""
        if (module, name) == (__name__, tensor_of.__name__):
            return self._tensor
        if (module, name) == (__name__, generator_of.__name__):
            return self._generator
        found = super().find_class(module, name)
        if name in _CLASS_MAKERS and module.startswith("cloudpickle."):
            return _untracked(found)
        return found

    def _generator(self, number: int, make: Callable[..., Any], arguments: Any) -> Any:
        self.generators[number] = make(*arguments)
        return self.generators[number]

    def _tensor(
        self,
        number: int | None,
        first: int | None,
        shape: Any,
        dtype: Any,
        device: str,
        requires_grad: bool,
        parameter: bool,
    ) -> Any:
        if number is None or first is None:
            return torch.empty(shape, dtype=dtype, device=device)
        if first == number:
            tensor = torch.zeros(shape, dtype=dtype, device=device)
        else:  # in the memory of the first one
            tensor = self.tensors[first].detach().view(shape)
        if parameter:
            tensor = torch.nn.Parameter(tensor, requires_grad=requires_grad)
        self.tensors[number] = tensor
        return tensor


_CLASS_MAKERS = ("_make_skeleton_class", "_make_skeleton_enum", "_make_typevar")
"""Functions of cloudpickle with an argument that names a class which they have made before."""


def _untracked(make: Callable[..., Any]) -> Callable[..., Any]:
    """Let each model of a worker have classes of its own, whose functions read its tensors."""
    place = list(inspect.signature(make).parameters).index("class_tracker_id")

    def made(*args: Any) -> Any:
        return make(*args[:place], None, *args[place + 1 :])

    return made
