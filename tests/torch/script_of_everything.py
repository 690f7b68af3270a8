"""A script that holds what the decorators of Python's standard library make; see `of_script`."""

import collections
import contextlib
import dataclasses
import enum
import functools
import logging
import threading
import types
import typing
import weakref

import keras
import numpy as np
from keras import ops

log = logging.getLogger("script")
lock, rlock = threading.Lock(), threading.RLock()
local = threading.local()
local.value = 2.0
frozen = types.MappingProxyType({"a": 1.0})


@functools.lru_cache(maxsize=4)
def positions(length, width):
    return np.sin(np.arange(length * width).reshape(length, width))


@functools.cache
def power(n):
    return 1.0 if n == 0 else 2 * power(n - 1)


@functools.singledispatch
def show(x):
    return 1.0


@show.register
def _(x: int):
    return 2.0 + show("a")


@show.register(list)
def _list(x):
    return sum(map(show, x))


def loud(f):
    @functools.wraps(f)
    def g(*a, **k):
        return f(*a, **k)

    return g


@loud
def wrapped(x):
    return 3.0 * x


double = functools.partial(wrapped, 2.0)


@functools.total_ordering
@dataclasses.dataclass
class Size:
    n: int = 3
    names: list = dataclasses.field(default_factory=list)

    def __lt__(self, other):
        return self.n < other.n


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fixed:
    a: float = 1.0


class Color(enum.Enum):
    RED = 1
    BLUE = enum.auto()


class Bits(enum.Flag):
    A = enum.auto()
    B = enum.auto()


class Level(enum.IntEnum):
    LOW = 1


Point = collections.namedtuple("Point", "x y")


class Typed(typing.NamedTuple):
    a: int = 1


class TD(typing.TypedDict):
    a: int


T = typing.TypeVar("T")


class Gen(typing.Generic[T]):
    def get(self) -> T:
        return 1.0


class Proto(typing.Protocol):
    def f(self): ...


@contextlib.contextmanager
def scope(x):
    with lock:
        yield x


class Deco(contextlib.ContextDecorator):
    def __enter__(self):
        return self

    def __exit__(self, *a):
        return False


@Deco()
def decorated():
    return 1.0


class Held:
    value = 1.5


held = Held()
ref = weakref.ref(held)
values = weakref.WeakValueDictionary(a=held)


class Everything(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.held, self.weak, self.proxy = held, weakref.ref(held), weakref.proxy(held)
        self.lock = threading.Lock()
        self.size, self.color = Size(4), Color.BLUE
        self.inner = keras.layers.Dense(6)
        self.back = weakref.ref(self.inner)

    @functools.cached_property
    def scale(self):
        return 0.5

    @functools.lru_cache  # noqa: B019 (users do so)
    def method(self, n):
        return float(n)

    @functools.singledispatchmethod
    def kind(self, x):
        return 1.0

    @kind.register
    def _(self, x: int):
        return 2.0

    half = functools.partialmethod(method, 2)

    @staticmethod
    @functools.cache
    def static(n):
        return 1.0 * n

    @property
    def prop(self):
        return 1.0

    def call(self, x):
        log.debug("called")
        total = (
            self.scale
            + self.method(3)
            + self.kind(1)
            + self.kind("a")
            + self.half()
            + self.static(2)
        )
        total += (
            power(5)
            + show(3)
            + show([1, 2, "a"])
            + double()
            + (Size(1) <= Size(2))
            + len(dataclasses.fields(self.size))
        )
        total += (
            Fixed(a=2.0).a
            + Color.RED.value
            + (self.color is Color.BLUE)
            + Level.LOW
            + len(Bits.A | Bits.B)
            + Point(1, 2).x
            + Typed().a
            + Gen().get()
            + TD(a=1)["a"]
        )
        total += (
            dataclasses.replace(self.size, n=5).n + (Size(1) >= Size(2)) + decorated() + frozen["a"]
        )
        total += (
            self.weak().value
            + self.proxy.value
            + ref().value
            + values["a"].value
            + (self.back() is self.inner)
        )
        with scope(1.0) as y, rlock, self.lock, contextlib.nullcontext():
            total += y
        total += getattr(local, "value", 0.0)
        return self.inner(x) * (total / 50) + ops.convert_to_tensor(
            positions(*x.shape[1:]), dtype=x.dtype
        )


def loss(y, p):
    return ops.mean(ops.square(y - p), -1) * power(1)
