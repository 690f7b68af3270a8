"""What differs between versions of JAX: the operations that it has, and their parameters."""

import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from lockstep.engines.jax import jax_compat
from lockstep.engines.jax.processes.program_fingerprint import _parts
from lockstep.engines.jax.rowtrace import row_trace, traced_operation
from lockstep.engines.jax.rowtrace.primitive_rules import has_rule
from lockstep.errors import UnsupportedFramework

WITHOUT_RULE = {
    "several devices": """
        all_gather all_gather_done all_gather_invariant all_gather_reduced
        all_gather_reduced_start all_gather_start all_to_all all_to_all_done all_to_all_start
        axis_index full_to_shard global_array_to_host_local_array host_local_array_to_global_array
        mesh_cast pbroadcast pbroadcast_done pbroadcast_dynamic pbroadcast_start pgather pmax pmin
        ppermute ppermute_done ppermute_start precv preduced psend psum psum_done psum_invariant
        psum_invariant_start psum_start pvary ragged_all_to_all reduced_vary_cast
        reduced_vary_cast_p relayout reshard shard_alike shard_map shard_to_full spsolve
        unreduced_pmax unreduced_pmin unreduced_psum unreduced_psum_start unreduced_reduce_scatter
        unreduced_reduce_scatter_start vary_unreduced_cast vary_unreduced_cast_p xla_pmap
    """,
    "memory that is written": """
        accum_grad_in_ref addupdate box_get box_set empty_ref for free_ref freeze get get_global
        log_extend log_read masked_load masked_swap mutable_array new_box new_log new_ref pin
        run_state swap unpin
    """,
    "code outside of the program": """
        buffer_callback call_exported call_tf check cudnn_fusion custom_fusion custom_partitioning
        debug_callback debug_print ffi_call inspect_sharding io_callback pure_callback
        tpu_custom_call
    """,
    "order, places and memory": """
        add_dependency after_all compute_on create_token dce_sink delay device_put empty empty2
        has_memory_space layout_constraint platform_index program_order remove_memory_space stage
        tie unreachable with_memory_space_constraint xla_metadata_value
    """,
    "only inside of transformations": """
        call_hi_primitive_linearized create_linear custom_jvp_call_jaxpr custom_lin
        custom_transpose_call eval_jaxpr from_edtype iota_2x32_shape jaxpr_call linear_call
        remat_opt to_edtype trace_value zeros_like
    """,
    "calls of programs that no layer of Keras makes": """
        assert_consumed_value call composite consume core_map custom_vmap_call fused_call mpmd_map
        xla_metadata_call
    """,
    "shapes that are no numbers": "dim_as_value dimension_size shape_assertion",
    "made of rows alone": "iota",
    "other generators of random numbers": "philox2x32 philox4x32 threefry4x32",
    "products, attention and RNNs that cuDNN computes": """
        bias_bwd bias_fwd dot_product_attention_bwd dot_product_attention_bwd_wrapper
        dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper
        dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
        dot_product_attention_fwd dot_product_attention_fwd_wrapper rnn_bwd rnn_fwd scaled_matmul
        scaled_matmul_wrapper
    """,
    "gradients of windows": "select_and_gather_add select_and_scatter select_and_scatter_add",
    "not needed so far": """
        approx_top_k broadcast_to cholesky_update eigh_jacobi geqp3 geqrf hessenberg ormqr
        polynomial ragged_dot_general rng_uniform scaled_dot scatter-sub schur symmetric_product
        tridiagonal tridiagonal_solve
    """,
}
"""Operations that are refused where they get rows, and why they have no rule."""


OPERATIONS = """
import importlib, pkgutil, sys, warnings
import jax, jax.experimental
from jax.extend.core import Primitive

warnings.simplefilter("ignore")
elsewhere = ("pallas", "mosaic", "sparse", "tpu", "triton", "jax2tf", "thunky", "tools")
for module in pkgutil.walk_packages(jax.__path__, "jax.", onerror=lambda name: None):
    if not any(word in module.name for word in elsewhere):
        try:
            importlib.import_module(module.name)
        except ImportError:
            pass
for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "jax" and not any(word in name for word in elsewhere):
        for value in list(vars(module).values()):
            if isinstance(value, Primitive):
                print(value.name)
"""
"""A program that prints the operations of all modules of JAX, whatever a test has imported."""


def test_every_operation_of_jax_has_a_rule_or_a_reason():
    """A new version of JAX may compute what Keras calls by an operation that is not known."""
    printed = subprocess.run(
        [sys.executable, "-c", OPERATIONS], capture_output=True, text=True, check=True
    ).stdout
    found = {name for name in printed.split() if not name.startswith(("bcoo", "bcsr", "pallas"))}
    assert {"add", "scan", "select_and_scatter_add"} <= found, "operations are seen"
    known = {name for names in WITHOUT_RULE.values() for name in names.split()}
    assert not {name for name in found - known if not has_rule(name)}
    assert not {name for name in known if has_rule(name)}


def scan_of(function, *values):
    (equation,) = (
        each for each in jax.make_jaxpr(function)(*values).eqns if each.primitive.name == "scan"
    )
    return equation


def scan_with(**parameters):
    return SimpleNamespace(params=parameters, primitive=SimpleNamespace(name="scan"))


def running(x):
    return lax.scan(lambda both, row: ((both[0] + row, both[1] * row), None), (x[0], x[1]), x)


def test_both_forms_of_a_scan_are_read():
    assert jax_compat.scan_counts(scan_of(running, jnp.ones((4, 3)))) == (0, 2)
    before = scan_with(num_consts=3, num_carry=1, length=2)
    assert jax_compat.scan_counts(before) == (3, 1)
    tree = SimpleNamespace(unpack=lambda: ((None,) * 3, (None,), ()))
    since = scan_with(ft_in=tree, ft_out=tree, length=2)
    assert jax_compat.scan_counts(since) == (3, 1)


@pytest.mark.parametrize("form", [{}, {"ft_in": 3}, {"num_consts": 1}])
def test_an_unknown_form_of_a_scan_is_an_error_in_words(form):
    with pytest.raises(UnsupportedFramework, match=f"scan .*JAX {jax.__version__}, but"):
        jax_compat.scan_counts(scan_with(**form))


def test_a_parameter_that_this_jax_does_not_have_is_an_error_in_words():
    equation = scan_of(running, jnp.ones((4, 3)))
    assert jax_compat.parameters(equation)["length"] == 4
    with pytest.raises(UnsupportedFramework, match="scan has no parameter 'steps' in JAX"):
        jax_compat.parameters(equation)["steps"]


@pytest.mark.parametrize("name", ["scan", "sort", "reduce_max"])
def test_what_cannot_be_read_is_refused_by_name(name, monkeypatch):
    """As in a JAX that has given the parameters of an operation other names."""

    def function(x):
        steps = lax.scan(lambda carry, step: (carry + step, None), x[:, 0], x.T)[0]
        return jnp.sort(x, 1) - x.max(1, keepdims=True) + steps[:, None]

    plain = jax_compat.parameters

    def parameters(equation):
        found = plain(equation)
        if equation.primitive.name == name:
            for key in list(found):
                found[f"other_{key}"] = found.pop(key)
        return found

    for module in (jax_compat, row_trace, traced_operation):
        monkeypatch.setattr(module, "parameters", parameters)
    found = row_trace.trace_rows(
        lambda x: (function(x), [], []),
        lambda rows: (jax.ShapeDtypeStruct((rows, 3), "float32"),),
        (4, 2),
    )
    why = f"cannot be analyzed with JAX {jax.__version__}"
    assert str(found.outputs).startswith(f"{name} {why} (test_jax_compat.py:")


def fingerprint(function):
    program = jax.make_jaxpr(function)(jnp.ones((4, 3)))
    return b"|".join(_parts(program))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            lambda x: jnp.searchsorted(jnp.arange(3.0), x, side="left"),
            lambda x: jnp.searchsorted(jnp.arange(3.0), x, side="right"),
        ),
        (lambda x: jnp.nonzero(x, size=2)[0], lambda x: jnp.nonzero(x, size=2)[1]),
    ],
)
def test_operations_that_are_classes_have_their_parameters_in_a_fingerprint(one, other):
    """JAX 0.11 and later: their parameters tell two programs apart, and nothing else does."""
    assert fingerprint(one) == fingerprint(one)
    assert fingerprint(one) != fingerprint(other)


def test_programs_in_operations_that_are_classes_are_found():
    (inside,) = jax.make_jaxpr(lambda x: jnp.ldexp(x, 1))(jnp.ones(3)).eqns
    (program,) = jax_compat.programs_of(inside)

    def operations(program):
        for equation in program.eqns:
            yield equation.primitive.name
            for inner in jax_compat.programs_of(equation):
                yield from operations(inner)

    assert "select_n" in set(operations(program))
