"""Functions named on a command line."""

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.errors import TargetNotFound, UnsupportedBackend, UnusableData


def call_target(target: str) -> Any:
    """Call `path/to/file.py:function` or `package.module:function`, and return its result.

    Raises:
        TargetNotFound: If there is no such file, module or function, or it needs arguments,
            or ends Python.
        UnsupportedBackend: If it asks for another backend than the one that has started.
    """
    place, _, name = target.rpartition(":")
    if not place:
        raise TargetNotFound(
            f"{target!r} names no function.\nWrite file.py:function or package.module:function."
        )
    module = load_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise TargetNotFound(
            f"{target!r} was requested, but {place} has no function {name!r}.\n"
            + _similar(place, name, module)
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise TargetNotFound(
            f"{target!r} was requested, but {name} needs arguments: {error}.\n"
            "Name a function without required arguments."
        ) from None
    except ValueError:  # no signature is known
        pass
    with _as_a_script(place):
        result = function()
    _check_backend(place)
    return result


def _similar(place: str, name: str, module: ModuleType) -> str:
    """Return the remedy for a wrong name of a function: a similar name, or all names."""
    functions = [
        each
        for each, item in vars(module).items()
        if inspect.isfunction(item) and item.__module__ == module.__name__ and each[0] != "_"
    ]
    meant = difflib.get_close_matches(name, functions, n=1)
    if meant:
        return f"Did you mean {place}:{meant[0]}?"
    there = f" It has {', '.join(functions[:5])}." if functions else ""
    return f"Name a function that returns a compiled model, or (model, data).{there}"


def _check_backend(place: str) -> None:
    """Raise if the target sets another backend than the one that has started."""
    asked = os.environ.get("KERAS_BACKEND")
    got = getattr(getattr(sys.modules.get("keras"), "backend", None), "backend", lambda: asked)()
    if asked != got:
        raise UnsupportedBackend(
            f"{place} sets KERAS_BACKEND={asked}, but Keras had already started on {got}.\n"
            f"Set KERAS_BACKEND={asked} in the environment of the command."
        )


def model_and_data(target: str) -> tuple[Any, Any]:
    """Return the `(model, data)` of a target.

    Raises:
        TargetNotFound: If it returns anything else.
    """
    result = call_target(target)
    import keras

    pair = isinstance(result, tuple) and len(result) == 2
    if not pair or (isinstance(result[1], keras.Model) and not isinstance(result[0], keras.Model)):
        what = "(data, model)" if pair else f"a {type(result).__name__}"
        raise TargetNotFound(
            f"{target} returned {what}, but (model, data) was expected.\n"
            "Return a compiled model and (x, y), or a data set of such batches."
        )
    return result[0], result[1]


def float64_model_and_data(target: str) -> tuple[Any, Any]:
    """Make this process compute in float64, and return the `(model, data)` of a target.

    Raises:
        TargetNotFound: If it returns anything else.
        UnusableData: If a layer of the model computes in another type.
    """
    from lockstep.keras_compat import compute_in_float64, layers_not_in_float64

    compute_in_float64(whatever_is_asked=True)
    model, data = model_and_data(target)
    others = layers_not_in_float64(model)
    if others:
        raise UnusableData(
            f"float64 was requested, but {others[0].name!r} of {target} computes in "
            f"{others[0].compute_dtype}.\nBuild the model without an explicit dtype. A model "
            "that is loaded from a file keeps the dtype of the file."
        )
    return model, data


def model_alone(target: str) -> Any:
    """Return the model of a target that returns a model or `(model, data)`.

    Raises:
        TargetNotFound: If it returns anything else.
    """
    import keras

    result = call_target(target)
    model = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(model, keras.Model):
        raise TargetNotFound(
            f"{target} returned a {type(model).__name__}, but a Keras model was expected.\n"
            "Return a built model from the function."
        )
    return model


def load_module(place: str) -> ModuleType:
    """Return the module in a file, or the module of a name.

    A file is run as a module of its own, with its folder on the import path, as Python
    does with a script.

    Raises:
        TargetNotFound: If there is no such file or module, or it ends Python.
    """
    if place.endswith(".py"):
        return _load_file(Path(place))
    if place.startswith("."):
        raise TargetNotFound(
            f"{place!r} was requested, but a module name cannot begin with a dot.\n"
            "Write package.module:function, or file.py:function."
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        with _as_a_script(place):
            return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not place.startswith(error.name):
            raise  # an import in the module of the user has failed
        raise TargetNotFound(
            f"{place!r} was requested, but there is no module {error.name!r}.\n"
            f"Modules are searched in {Path.cwd()} and in the environment."
        ) from None


def _load_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise TargetNotFound(
            f"{str(file)!r} was requested, but there is no file {file}.\n"
            f"The path is relative to {Path.cwd()}."
        )
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None, "a name that ends in .py has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent.resolve()))
    sys.modules[file.stem] = module
    with _as_a_script(str(file)):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _as_a_script(place: str) -> Iterator[None]:
    """Run code of the user with no arguments in `sys.argv`; `sys.exit` does not end the command."""
    before, sys.argv = sys.argv, [place]
    try:
        yield
    except SystemExit as error:
        raise TargetNotFound(
            f"{place} exited Python (with {error.code!r}) before the function could be called.\n"
            "Put the code that runs the script under if __name__ == '__main__':."
        ) from None
    finally:
        sys.argv = before
