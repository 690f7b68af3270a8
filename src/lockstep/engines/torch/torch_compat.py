# mypy: implicit-reexport
# ruff: noqa: F401
"""Every private name of PyTorch that lockstep uses, and no other module imports one.

Checked with PyTorch 2.13.0 and 2.15.0; `core/tried_versions.py` has the bounds.

Raises:
    UnsupportedFramework: If this PyTorch is too old, or lacks a name.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lockstep.core.tried_versions import TRIED, check_oldest
from lockstep.errors import UnsupportedFramework

check_oldest("torch", torch.__version__)
NEWEST = TRIED["torch"].newest


def _lacking(what: object) -> UnsupportedFramework:
    return UnsupportedFramework(
        f"PyTorch {torch.__version__} lacks an internal function that lockstep needs: {what}.\n"
        f"It exists up to PyTorch {NEWEST}, but may change in any version.\n"
        f'Run pip install "torch<={NEWEST}"'
    )


try:
    from torch._C._distributed_c10d import _register_process_group as name_group
    from torch._C._distributed_c10d import _unregister_process_group as forget_group
    from torch._functorch.compile_utils import fx_graph_cse as without_duplicates
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch._ops import OpOverload
    from torch.overrides import _get_current_function_mode as current_function_mode
    from torch.overrides import _get_current_function_mode_stack as function_modes
    from torch.overrides import _pop_mode_temporarily as pop_mode_temporarily
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

    plain_torch_functions = torch._C.DisableTorchFunctionSubclass
    """A context in which a subclass of `Tensor` is a plain tensor."""
    transforms_in_force = torch._C._functorch.peek_interpreter_stack
    """Returns the innermost transform of `torch.func`, `None` outside of all."""
    next_operation_number = torch._C._autograd._get_sequence_nr
    """Returns the number of the next operation that this thread makes for a backward pass."""
    hooks_of_saved_tensors = torch._C._autograd._top_saved_tensors_default_hooks
    """Returns the innermost `saved_tensors_hooks`, `None` outside of all."""
    current_backward = torch._C._current_graph_task_id
    """Returns the number of the backward pass that this thread runs, -1 outside of all."""
    functional_exchanges = torch.ops._c10d_functional
    """The operations by which `DTensor` exchanges."""
    attention_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    attention_back_on_cpu = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    )
    add_each_in_place, multiply_each = torch._foreach_add_, torch._foreach_mul
    copy_each = torch._foreach_copy_
except (ImportError, AttributeError) as error:
    raise _lacking(error) from error

_GLOO = getattr(dist, "ProcessGroupGloo", None)  # macOS and Windows may have none
_OPTIONS = _GLOO and getattr(_GLOO, "_Options", None)

ATTRIBUTES: tuple[tuple[Any, str], ...] = (
    (torch.Tensor, "_make_wrapper_subclass _version _backward_hooks _post_accumulate_grad_hooks"),
    (torch.UntypedStorage, "_cdata"),
    (DTensor, "_op_dispatcher _local_tensor"),
    (torch.ops.aten.add.Tensor, "_schema"),
    (torch.nn.Module(), "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks"),
    (torch.nn.modules.module, "_global_forward_hooks _global_backward_hooks"),
    (dist.ProcessGroup, "_allgather_base _reduce_scatter_base"),
    (_GLOO, "_Options"),
    (_OPTIONS and _OPTIONS(), "_timeout _devices"),
)
"""What has private attributes that other modules read or call, and their names."""

PARTS_OF_NAMES = frozenset({"_foreach", "_global", "_forward_cls"})
"""The begins of names of operations and of lists of hooks; of the class of a gradient."""

for _owner, _names in ATTRIBUTES:
    for _name in _names.split():
        if _owner is not None and not hasattr(_owner, _name):
            raise _lacking(f"{_owner!r} has no {_name}")


def sharding_rules() -> set[Any]:
    """Return the operations for which `DTensor` has a rule."""
    rules = DTensor._op_dispatcher.sharding_propagator
    tables = (rules.op_to_rules, rules.op_strategy_funcs, rules.op_single_dim_strategy_funcs)
    return {operation for table in tables for operation in table}


def mesh_without_group(rank: int, size: int, device: str, name: str) -> Any:
    """Return a mesh of one dim, and its process group, which exchanges nothing.

    Args:
        rank: The number of this process.
        size: The number of processes.
        device: The kind of their devices.
        name: What operations call the group.
    """
    mesh = DeviceMesh(device, torch.arange(size), _init_backend=False, _rank=rank)
    mesh._dim_group_names = [name]
    group = dist.ProcessGroup(dist.HashStore(), rank, size)
    group._set_group_name(name)
    return mesh, group


def compile_to_file(module: Any, forms: list[Any], path: str) -> None:
    """Compile a graph by inductor, and write the program to a file.

    Args:
        module: The graph.
        forms: The shape, the strides, the type and the device of each of its inputs.
        path: The file.
    """
    from torch._inductor import standalone_compile
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with mode:
        inputs = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype, device in forms
        ]
    options = {"emulate_precision_casts": True}  # bfloat16 is rounded where the step rounds it
    with torch.no_grad():
        standalone_compile(
            module,
            inputs,
            dynamic_shapes="from_example_inputs",
            fake_mode=mode,
            options={"config_patches": options},
        ).save(path=path, format="binary")


def load_compiled(path: str) -> Any:
    """Return the program that `compile_to_file` has written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an import of PyTorch's own
        from torch._inductor import CompiledArtifact

        return CompiledArtifact.load(path=path, format="binary")
