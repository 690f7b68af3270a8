"""The lines of a script for Keras 2 that Keras 3 needs in another form, by its syntax tree."""

from __future__ import annotations

import ast
import tokenize
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from lockstep.core.report import Report
from lockstep.errors import UnreadableFile, counted, printable

if TYPE_CHECKING:
    from rich.console import Console

_OPTIMIZERS = {"SGD", "RMSprop", "Adagrad", "Adadelta", "Adam", "Adamax", "Nadam"}
_FITS = {"fit", "fit_generator", "evaluate_generator", "predict_generator"}
_OF_COMPILE = 'remove it, and pass metrics=["accuracy"] to compile'
_OF_THE_DATA = "an argument of keras.utils.PyDataset; leave it out for a generator"

_KEYWORDS: dict[str, dict[str, str]] = {
    **{
        name: {
            "lr": "learning_rate=",
            "decay": "learning_rate=keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay): "
            "Keras 3 ignores decay=",
            "schedule_decay": "leave it out",
        }
        for name in _OPTIMIZERS
    },
    **{
        name: {
            "nb_epoch": "epochs=",
            "samples_per_epoch": "steps_per_epoch=, in batches",
            "nb_val_samples": "validation_steps=, in batches",
            **dict.fromkeys(
                ("workers", "use_multiprocessing", "max_queue_size", "max_q_size"), _OF_THE_DATA
            ),
            **dict.fromkeys(("nb_worker", "pickle_safe"), _OF_THE_DATA),
            "show_accuracy": _OF_COMPILE,
        }
        for name in _FITS
    },
    **{name: {"show_accuracy": _OF_COMPILE} for name in ("evaluate", "train_on_batch")},
    "ModelCheckpoint": {"period": 'save_freq=, in batches, or "epoch"'},
    "TensorBoard": {"write_grads": "leave it out", "batch_size": "leave it out"},
    "Model": {"input": "inputs=", "output": "outputs="},
    "ReduceLROnPlateau": {"epsilon": "min_delta=: Keras 3 ignores epsilon="},
    "multi_gpu_model": dict.fromkeys(
        ("cpu_merge", "cpu_relocation"), "leave it out: lockstep.multi_gpu_model merges no outputs"
    ),
}
"""Arguments by the last name of what is called."""

_OF_LAYERS = {
    "batch_input_shape": "keras.Input(batch_shape=...) before the layer",
    "border_mode": "padding=",
    "subsample": "strides=",
    "init": "kernel_initializer=",
    "inner_init": "recurrent_initializer=",
    "inner_activation": "recurrent_activation=",
    "W_regularizer": "kernel_regularizer=",
    "b_regularizer": "bias_regularizer=",
    "W_constraint": "kernel_constraint=",
    "b_constraint": "bias_constraint=",
    "dropout_W": "dropout=",
    "dropout_U": "recurrent_dropout=",
    "p": "rate=",
    "bias": "use_bias=",
    "dim_ordering": "data_format=",
    "nb_filter": "filters=",
    **dict.fromkeys(("nb_row", "nb_col", "filter_length"), "kernel_size="),
    "output_dim": "units=",
}
_HAVE_OUTPUT_DIM = {"Embedding"}
_OLD_CONVOLUTIONS = {"Convolution2D": 2, "Convolution3D": 3}
"""Their first names, which Keras 3 has as well. Each size of a kernel was an argument."""

_GENERATORS = {
    "fit_generator": ("fit", ("steps_per_epoch", "epochs")),
    "evaluate_generator": ("evaluate", ("steps",)),
    "predict_generator": ("predict", ("steps",)),
}
"""The method of Keras 3, and the names of the arguments that follow the data by position."""

_METHODS = {
    "predict_classes": "predict(...).argmax(axis=-1)",
}

_NO_SESSION = "leave it out: Keras 3 has no sessions"
_BY_MODE = "keras.layers.concatenate, add, multiply or dot, by its mode="
_OF_FUNCTIONS = {
    "flatten": "keras.ops.reshape(x, (-1,))",
    "function": "keras.Model(inputs, outputs), which is called with arrays",
    "merge": _BY_MODE,
}
"""For functions of Keras 2 whose names are those of modules, too."""
_REMEDIES = {
    "ImageDataGenerator": "keras.utils.image_dataset_from_directory and layers such as "
    "keras.layers.RandomFlip (docs/old-script.md)",
    "Tokenizer": "keras.layers.TextVectorization",
    "CuDNNLSTM": "keras.layers.LSTM",
    "CuDNNGRU": "keras.layers.GRU",
    "KerasClassifier": "keras.wrappers.SKLearnClassifier",
    "KerasRegressor": "keras.wrappers.SKLearnRegressor",
    "np_utils": "keras.utils.to_categorical",
    "Merge": _BY_MODE,
    "get_value": "keras.ops.convert_to_numpy(variable)",
    "set_value": "variable.assign(value); model.optimizer.learning_rate = value",
    "learning_phase": "the argument `training` of `call`",
    **dict.fromkeys(("set_session", "get_session", "tensorflow_backend"), _NO_SESSION),
}
"""For names of Keras 2 that Keras 3 has nowhere."""

_OF_TENSORFLOW = {
    **dict.fromkeys(("Session", "ConfigProto", "GPUOptions", "get_default_graph"), _NO_SESSION),
    "device": "leave the `with` out: lockstep places the model",
    "set_random_seed": "keras.utils.set_random_seed(seed)",
}

_HOMES = (
    *("layers", "models", "utils", "optimizers", "callbacks", "ops", "losses", "metrics"),
    *("initializers", "regularizers", "saving", "preprocessing.image", "preprocessing.sequence"),
)
"""The modules of Keras 3 where a name that has moved is looked for."""


@dataclass(frozen=True)
class Change:
    """A line of a script, what is old in it, and what Keras 3 has for it."""

    line: int
    old: str
    new: str


_ALL_KNOWN = (
    "The list may be incomplete: lockstep only knows these changes, and does not see names and "
    "files that the script creates at run time."
)


@dataclass(frozen=True)
class ScriptInspection(Report):
    """The lines of a script that have to change for Keras 3.

    Attributes:
        path: The script.
        changes: In the order of the lines.
    """

    path: str
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        """How many places have to change."""
        if not self.changes:
            return f"{printable(self.path)}: nothing of Keras 2 was found."
        return f"{printable(self.path)}: {counted(len(self.changes), 'place')} to change."

    def show(self, console: Console) -> None:
        """Print each place, and below it the change."""
        from rich.text import Text

        for change in self.changes:
            place = f"{self.path}:{change.line}"
            for text in (f"{place}: {change.old}", f"    {change.new}"):
                console.print(Text(printable(text)), soft_wrap=True)
        console.print(Text(str(self)), soft_wrap=True)
        console.print(Text(_ALL_KNOWN), soft_wrap=True)


def inspect_script(path: str) -> ScriptInspection:
    """Find what Keras 3 has in another form. Nothing of the script is executed.

    Args:
        path: A file of Python source.

    Returns:
        The lines and their changes.

    Raises:
        UnreadableFile: It cannot be read, or is no Python 3.
    """
    try:
        with tokenize.open(path) as file:
            tree = ast.parse(file.read())
    except OSError as error:
        raise UnreadableFile(f"{path} cannot be read: {error.strerror}.") from None
    except (SyntaxError, ValueError) as error:
        place = f"line {error.lineno}: " if isinstance(error, SyntaxError) else ""
        raise UnreadableFile(
            f"{path} is not Python 3. {place}{getattr(error, 'msg', error)}.\n"
            "Convert it to Python 3 first."
        ) from None
    reader = _Reader(_metric_names(tree))
    reader.visit(tree)
    found = sorted(set(reader.changes), key=lambda change: (change.line, change.old))
    return ScriptInspection(path, tuple(found))


class _Reader(ast.NodeVisitor):
    """Collects the changes, with the names that imports give.

    Args:
        metrics: The names of metrics that the script gives `compile`.
    """

    def __init__(self, metrics: set[str]) -> None:
        self._metrics = metrics
        self.changes: list[Change] = []
        self._imported: dict[str, str] = {}  # a name of the script: what was imported by it
        self._under_tensorflow = False
        self._parallel: set[str] = set()  # names of results of multi_gpu_model

    def _add(self, node: ast.stmt | ast.expr, old: str, new: str) -> None:
        self.changes.append(Change(node.lineno, old, new))

    # ------------------------------------------------------------------ imports

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.split(".")[0]
            self._imported[alias.asname or name] = name
            keras = _of_keras(alias.name)
            if keras and (keras != alias.name or not _is_public(keras)):
                self._add(node, f"import {alias.name}", _import_of(keras, alias.asname))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None:
            return
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            self._imported[alias.asname or alias.name] = name
            keras = _of_keras(name)
            if keras and alias.name != "*" and (keras != name or not _is_public(keras)):
                shown = f"from {node.module} import {alias.name}"
                self._add(node, shown, _import_of(keras, alias.asname))

    # ------------------------------------------------------------------ uses

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._full_name(node)
        keras, last = _of_keras(name), node.attr
        if keras and not _is_public(keras):
            self._add(node, _dotted(node), _moved(keras) or f"Keras 3 has no {keras}")
            return
        if keras and keras != name and not self._under_tensorflow:
            self._under_tensorflow = True
            self._add(node, "tf.keras", "keras, here and below, with `import keras`")
        if name.startswith("tensorflow.") and name.count(".") == 1 and last in _OF_TENSORFLOW:
            self._add(node, _dotted(node), _OF_TENSORFLOW[last])
        if last == "lr" and _dotted(node).split(".")[-2:-1] == ["optimizer"]:
            new = "optimizer.learning_rate: an assignment to `lr` changes nothing"
            self._add(node, "optimizer.lr", new)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        made = node.value
        if isinstance(made, ast.Call) and _dotted(made.func).split(".")[-1] == "multi_gpu_model":
            self._parallel.update(filter(None, map(_dotted, node.targets)))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        of = _dotted(node.value)
        if of.endswith(".layers") and of.removesuffix(".layers") in self._parallel:
            model = of.removesuffix(".layers")
            new = f"{model}: it is now the model itself, and this is one of its layers"
            self._add(node, ast.unparse(node), new)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = _dotted(node.func)
        last = called.split(".")[-1]
        root = self._imported.get(called.split(".")[0], "keras")
        if root.split(".")[0] in ("keras", "tensorflow", "lockstep"):
            known = _KEYWORDS.get(last) or (_OF_LAYERS if last in _public("keras.layers") else {})
            for word in node.keywords:
                has_it = word.arg == "output_dim" and last in _HAVE_OUTPUT_DIM
                if word.arg in known and not has_it:
                    self._add(word.value, f"{last}({word.arg}=)", known[word.arg])
            self._file_names(node, last, called)
            sizes = _OLD_CONVOLUTIONS.get(last)
            if sizes and len(node.args) > sizes:
                filters, *kernel = map(ast.unparse, node.args[: sizes + 1])
                old = f"{last}({', '.join([filters, *kernel])})"
                new = f"{last}({filters}, ({', '.join(kernel)})): by position, strides follow"
                self._add(node, old, new)
            self._monitored(node)
        if isinstance(node.func, ast.Attribute) and last in _METHODS:
            self._add(node, f"{last}(...)", _METHODS[last])
        if isinstance(node.func, ast.Attribute) and last in _GENERATORS:
            method, names = _GENERATORS[last]
            given = zip(names, map(ast.unparse, node.args[1:]), strict=False)
            words = "".join(f", {name}={value}" for name, value in given)
            new = f"{method}(...{words})"
            new += ": by position, it would be batch_size" if words else ""
            self._add(node, f"{last}(...)", new)
        self.generic_visit(node)

    def _file_names(self, node: ast.Call, last: str, called: str) -> None:
        words = {word.arg: word.value for word in node.keywords}
        file = node.args[0] if node.args else words.get("filepath")
        allowed: tuple[str, ...] = ()
        if last == "ModelCheckpoint":
            only = words.get("save_weights_only")
            weights = isinstance(only, ast.Constant) and bool(only.value)
            allowed = (".weights.h5",) if weights else (".keras", ".h5")
        elif last == "save_weights":
            allowed = (".weights.h5",)
        elif last == "save" and "model" in called.lower():
            allowed = (".keras", ".h5", ".hdf5")
        end = _end_of_text(file)
        if file is not None and end is not None and allowed and not end.endswith(allowed):
            self._add(file, f"{last}({end!r})", f"the name has to end in {allowed[0]}")

    def _monitored(self, node: ast.Call) -> None:
        for word in node.keywords:
            if word.arg == "monitor" and isinstance(word.value, ast.Constant):
                old = str(word.value.value)
                # Keras 3 names a metric as `compile` does.
                if old in ("acc", "val_acc") and "acc" not in self._metrics:
                    new = f'monitor="{old}uracy", for metrics=["accuracy"]'
                    self._add(word.value, f"monitor={old!r}", new)

    def _full_name(self, node: ast.expr) -> str:
        first, _, rest = _dotted(node).partition(".")
        return f"{self._imported.get(first, '')}.{rest}"


def _metric_names(tree: ast.AST) -> set[str]:
    """Return the texts in what a script gives as `metrics=`."""
    given = [node.value for node in ast.walk(tree) if _is_metrics(node)]
    inside = [each for value in given for each in ast.walk(value)]
    return {str(each.value) for each in inside if isinstance(each, ast.Constant)}


def _is_metrics(node: ast.AST) -> TypeGuard[ast.keyword]:
    return isinstance(node, ast.keyword) and node.arg == "metrics"


def _dotted(node: ast.expr) -> str:
    """`a.b.c` of such an expression; other parts are empty."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _end_of_text(node: ast.expr | None) -> str | None:
    """The last literal of an expression that makes a text, `None` where there is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr) and node.values:
        return _end_of_text(node.values[-1])
    if isinstance(node, ast.BinOp):
        return _end_of_text(node.right if isinstance(node.op, ast.Add) else node.left)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "format":
            return _end_of_text(node.func.value)
        if node.func.attr == "join" and node.args:
            return _end_of_text(node.args[-1])
    return None


# ---------------------------------------------------------------------- names of Keras 3


def _of_keras(name: str) -> str:
    """A name of Keras or of TensorFlow's Keras as a name of Keras; "" for any other."""
    for prefix in ("tensorflow.python.keras", "tensorflow.keras", "keras"):
        if name == prefix or name.startswith(f"{prefix}."):
            return f"keras{name.removeprefix(prefix)}"
    return ""


def _import_of(keras: str, asname: str | None) -> str:
    """The import that gives a name of Keras 3, or the remedy."""
    if keras == "keras":
        return "import keras"
    home = keras if _is_public(keras) else _moved(keras)
    if home is None:
        return f"Keras 3 has no {keras}"
    module, _, last = home.rpartition(".")
    if not home.replace(".", "").isidentifier() or not module:
        return home
    return f"from {module} import {last}" + (f" as {asname}" if asname else "")


def _moved(keras: str) -> str | None:
    """Where Keras 3 has a name that is gone from its place, or what to do without it."""
    parts = keras.split(".")
    if "multi_gpu_model" in parts:
        return "lockstep.multi_gpu_model"
    if parts[-1] in _OF_FUNCTIONS:
        return _OF_FUNCTIONS[parts[-1]]
    for part in reversed(parts):
        if part in _REMEDIES:
            return _REMEDIES[part]
    for home in _HOMES:
        if parts[-1] in _public(f"keras.{home}"):
            return f"keras.{home}.{parts[-1]}"
    return None


def _is_public(keras: str) -> bool:
    """Whether Keras 3 has this name. What follows the name of a class is not looked at."""
    module = "keras"
    for part in keras.split(".")[1:]:
        if part == "src":  # private, and there
            return True
        if _folder(f"{module}.{part}").is_dir():
            module = f"{module}.{part}"
        else:
            return part.startswith("__") or part in _public(module)
    return True


def _folder(module: str) -> Path:
    spec = find_spec("keras")  # which does not import it
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'keras'", name="keras")
    return Path(spec.origin).parent.joinpath(*module.split(".")[1:])


@cache
def _public(module: str) -> frozenset[str]:
    """The names that a module of Keras exports: its file has one import for each."""
    tree = ast.parse((_folder(module) / "__init__.py").read_text(encoding="utf-8"))
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    return frozenset(alias.asname or alias.name for node in imports for alias in node.names)
