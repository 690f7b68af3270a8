"""What traced operations do, comparable with what those of another trace do."""

from collections.abc import Mapping
from typing import Any

from lockstep.engines.tensorflow.proof.states import calls_of


def program_of(operations: list[Any], variables: Mapping[int, Any] | None = None) -> list[Any]:
    """What these operations do, comparable with those of another trace.

    Constants count where they are used: the second who uses one from outside of the
    graph makes no new one.

    Args:
        operations: In the order in which they were made.
        variables: What a variable from outside is known as, by the identity of the tensor
            that stands for it inside.
    """
    known: dict[int, Any] = dict(variables or {})
    others: dict[int, int] = {}  # in the order in which they are used
    done: list[Any] = []
    for op in operations:
        if op.type in ("Placeholder", "Const"):
            continue
        # What an assertion says has the names of tensors in it, which every trace makes anew.
        inputs = op.inputs[:1] if op.type == "Assert" else op.inputs
        sources = [
            source.op.node_def.attr["value"].SerializeToString()
            if source.op.type == "Const"
            else known.get(id(source)) or others.setdefault(id(source), len(others))
            for source in inputs
        ]
        inside = [program_of(graph.get_operations()) for graph in calls_of(op)]
        for number, output in enumerate(op.outputs):
            known[id(output)] = (len(done), number)
        done.append((op.type, _options(op), sources, inside))
    return done


def _options(op: Any) -> dict[str, Any]:
    """What an operation is told, but for the names, shapes and functions of a trace."""
    kinds = ("bool", "float", "int", "list(float)", "list(int)", "string", "type")
    names = ("container", "message", "shared_name", "token")
    return {
        each.name: op.get_attr(each.name)
        for each in op.op_def.attr
        if each.type in kinds and each.name not in names
    }
