"""Compiles the graph of a step by PyTorch's inductor, in a process beside the training.

Inductor replaces functions of PyTorch while it compiles, which another thread of the training
would see. The process reads no data and takes no device; what it has compiled is loaded here.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter, getitem
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from lockstep.engines.torch.torch_compat import OpOverload, compile_to_file, load_compiled
from lockstep.engines.torch.traced.draws import NodeNumber, draw_in_order
from lockstep.engines.torch.traced.graph import is_draw  # which registers the exchanges

COMPILED, COMPILING = "", " "
"""The states of a compilation; any other text says why it failed. Ranks act on the greatest one."""


def is_wanted() -> bool:
    """Return whether graphs are compiled: `LOCKSTEP_INDUCTOR=0` leaves it out."""
    return os.environ.get("LOCKSTEP_INDUCTOR", "1") != "0"


class Compilation:
    """A graph that another process compiles.

    Args:
        module: The graph. It calls operations and has constants, and no other modules.
        inputs: Tensors like its inputs.
        ranks: The number of ranks, which share the cores.

    Attributes:
        program: What has been compiled, to be called as the graph; `None` until it is loaded.
    """

    def __init__(self, module: GraphModule, inputs: list[Any], ranks: int) -> None:
        self.program: Callable[..., Any] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-")
        folder = Path(self._folder.name)
        rows, self._constants = _packed(module)
        forms = [
            (tuple(each.shape), each.stride(), each.dtype, each.device)
            for each in [*inputs, *self._constants]
        ]
        settings = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        with open(folder / _GRAPH, "wb") as graph:
            _Pickler(graph).dump((rows, forms, settings))
        with open(folder / _OUTPUT, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", _START, json.dumps([sys.path, str(folder)])],
                stdin=subprocess.PIPE,  # which ends with this process
                stdout=output,
                stderr=output,
                env=_environment(ranks),
                start_new_session=True,  # Ctrl-C is for the training
            )
        self.end = weakref.finalize(self, _end, self._process, self._folder)
        """Ends the process, and removes its files."""

    def state(self) -> str:
        """Return `COMPILING`, `COMPILED`, or why the compilation failed."""
        if self.program is not None:
            return COMPILED
        status = self._process.poll()
        if status is None:
            return COMPILING
        folder = Path(self._folder.name)
        reason = folder / _REASON
        if reason.exists():
            return reason.read_text()
        if status:
            return f"the process that compiled it ended with exit status {status}"
        try:
            program = load_compiled(str(folder / _PROGRAM))
        except Exception as error:  # a cache that somebody has emptied
            return reason_of(error)
        constants = self._constants
        self.program = lambda *inputs: program(*inputs, *constants)
        return COMPILED


def _end(process: "subprocess.Popen[bytes]", folder: Any) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):  # it and its children, such as a C++ compiler
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdin is not None:
        process.stdin.close()
    folder.cleanup()


def _environment(ranks: int) -> dict[str, str]:
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    environment.pop("LOCKSTEP_REHEARSE", None)
    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    return environment


# ------------------------------------------------------------------------- a graph as bytes


def _packed(module: GraphModule) -> tuple[list[Any], list[Any]]:
    """Return the nodes of a graph, with its constants as further inputs; and the constants.

    A `GraphModule` that is pickled is traced anew, which computes parts of it beforehand. Draws
    need one another, so that a compiler keeps their order.
    """
    nodes = list(module.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    names = list(dict.fromkeys(node.target for node in nodes if node.op == "get_attr"))
    numbers = {node: NodeNumber(number) for number, node in enumerate(inputs)}
    of_constant = {name: NodeNumber(len(inputs) + number) for number, name in enumerate(names)}
    rows: list[Any] = []
    drawn: NodeNumber | None = None

    def add(target: Any, arguments: Any, options: Any) -> NodeNumber:
        name = str(target) if isinstance(target, OpOverload) else target
        rows.append((name, arguments, options))
        return NodeNumber(len(inputs) + len(names) + len(rows) - 1)

    for node in nodes:
        if node.op == "get_attr":
            numbers[node] = of_constant[node.target]
        elif node.op != "placeholder":
            arguments = torch.fx.map_arg(node.args, numbers.__getitem__)
            options = torch.fx.map_arg(node.kwargs, numbers.__getitem__)
            if node.op == "output" or not is_draw(node):
                numbers[node] = add(node.target, arguments, options)
                continue
            numbers[node] = add(*draw_in_order(node.target, arguments, options, drawn), {})
            drawn = add(getitem, (numbers[node], 0), {})
            if len(node.target._schema.returns) == 1:
                numbers[node] = drawn
    return rows, [getattr(module, name) for name in names]


class _Pickler(pickle.Pickler):
    """Names memory formats by the module of PyTorch: pickle may find them in that of the script."""

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, torch.memory_format):
            return _of_torch, (str(item).removeprefix("torch."),)
        return NotImplemented


def _of_torch(name: str) -> Any:
    return getattr(torch, name)


def _unpacked(rows: list[Any], inputs: int) -> GraphModule:
    """Return a graph, given what `_packed` returns.

    Args:
        rows: Its nodes, without its inputs.
        inputs: The number of its inputs.
    """
    made = Graph()
    nodes: list[Node] = [made.placeholder(f"input_{number}") for number in range(inputs)]

    def read(nest: Any) -> Any:
        if isinstance(nest, NodeNumber):
            return nodes[nest]
        if isinstance(nest, slice):
            return slice(read(nest.start), read(nest.stop), read(nest.step))
        if isinstance(nest, list | tuple):
            return type(nest)(map(read, nest))
        if isinstance(nest, dict):
            return {name: read(value) for name, value in nest.items()}
        return nest

    for target, arguments, options in rows:
        if target == "output":
            nodes.append(made.output(read(arguments)[0]))
            continue
        if isinstance(target, str):
            target = attrgetter(target)(torch.ops)
        nodes.append(made.call_function(target, read(arguments), read(options)))
    return GraphModule(torch.nn.Module(), made)


# ------------------------------------------------------------------------- the other process


def main(folder: str) -> None:
    """Compile the graph in a folder, and leave there the program, or why there is none."""
    path = Path(folder)
    try:
        rows, forms, settings = pickle.loads((path / _GRAPH).read_bytes())
        torch.set_num_threads(settings[0])
        torch.use_deterministic_algorithms(settings[1])
        compile_to_file(_unpacked(rows, len(forms)), forms, str(path / _PROGRAM))
    except Exception as error:
        traceback.print_exc()
        (path / _REASON).write_text(reason_of(error))


def reason_of(error: Exception) -> str:
    """Return why a graph was not compiled, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for words, reason in _REASONS.items():
        if any(words in line for line in lines):
            return reason
    errors = [line for line in lines if "error:" in line]
    text = (errors or lines or [type(error).__name__])[0].rstrip(".")
    return text if len(text) <= _MOST else text[: _MOST - 3] + "..."


_REASONS = {
    "No working C++ compiler": "there is no C++ compiler, such as g++",
    "Cannot find a working triton installation": "Triton is not installed",
}
"""Words of inductor, and what they say."""

_MOST = 160
_GRAPH, _PROGRAM, _REASON, _OUTPUT = "graph", "program", "reason", "output"
_START = """\
import json, os, shutil, signal, sys, threading
sys.path[:], folder = json.loads(sys.argv[1])

def end_with_training():
    if not os.read(0, 1):
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

threading.Thread(target=end_with_training, daemon=True).start()
from lockstep.engines.torch.traced.inductor import main
main(folder)
"""
"""Leaves nothing behind when the process of the training ends, in whatever way: its input ends."""
