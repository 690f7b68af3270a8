"""Every attribute of another package's module or class that lockstep replaces, with its reason.

`PATCHES` is the list. A test compares it with the source, and looks up each attribute in the
installed packages. Attributes of instances, such as the methods of an attached model, are
not in it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Patch(NamedTuple):
    """One replacement.

    Attributes:
        where: The file and the function that replaces.
        what: Modules, and the attributes in them; "|" stands between the names of two versions.
        lasts: How long the replacement stays.
        reason: Why it is needed.
        checked: The versions that were checked.
    """

    where: str
    what: tuple[str, ...]
    lasts: str
    reason: str
    checked: str


_KERAS = "Keras 3.15.1 and 3.16.0.dev2026102704"
_CONTEXT, _PROCESS = "a context", "the process"

PATCHES = (
    Patch(
        "keras_compat/calls.py: symbolic_calls",
        (
            "keras: Operation.symbolic_call random.SeedGenerator.next",
            "keras/layers: Layer.symbolic_call Layer.__call__",
            "keras/src/layers/layer: Node",
            "keras/ops keras/src/ops: shape full broadcast_to repeat tile ones zeros",
            "keras/random keras/src/random: normal randint truncated_normal uniform dropout",
            "keras/src/backend/torch/core: custom_gradient.__call__",
        ),
        _CONTEXT,
        "The code of a user's layer is followed to find out whether it works row by row.",
        _KERAS,
    ),
    Patch(
        "keras_compat/calls.py: same_draws_for_all_rows",
        (
            "keras/src/backend: random.normal random.randint random.truncated_normal",
            "keras/src/backend: random.uniform random.dropout",
        ),
        _CONTEXT,
        "A comparison of several devices with one needs the same random numbers on both.",
        _KERAS,
    ),
    Patch(
        "keras_compat/calls.py: traced_by_torch",
        (
            "keras/src/backend/torch/random: torch_seed_generator",
            "keras/src/backend/torch/core: cond",
        ),
        _CONTEXT,
        "While a step on PyTorch is traced, Python reads no value: other threads are left alone.",
        _KERAS,
    ),
    Patch(
        "keras_compat/calls.py: keys_replaced",
        ("keras/src/backend: jax.random.jax_draw_seed|jax.ops.random.jax_draw_seed",),
        _CONTEXT,
        "A part of the rows of a batch draws the random numbers that the batch has in these rows.",
        _KERAS,
    ),
    Patch(
        "keras_compat/double_precision.py: compute_in_float64",
        (
            "keras: DTypePolicy._parse_name",
            "keras/src/backend: nn.dot_product_attention|ops.nn.dot_product_attention",
        ),
        _PROCESS,
        "A proof in float64 has float32 nowhere: in no policy, and not in the attention of JAX.",
        _KERAS,
    ),
    Patch(
        "keras_compat/data.py: serialized_objects_kept",
        ("keras/src/saving/serialization_lib: record_object_after_serialization",),
        _CONTEXT,
        "Keras takes a layer of a file for an earlier one if both have the same `id`.",
        _KERAS,
    ),
    Patch(
        "keras_compat/variables.py: variables_reported",
        ("keras/src/backend/jax/core: JaxVariable._initialize",),
        _CONTEXT,
        "A variable that is made inside `lockstep.sharded` goes to its shards at once.",
        _KERAS,
    ),
    Patch(
        "keras_compat/variables.py: variables_without_values",
        (
            "keras: Variable._initialize_with_initializer Variable._deferred_initialize",
            "keras: Variable.assign Model.fit Model.evaluate Model.predict Model.train_on_batch",
        ),
        _CONTEXT,
        "`lockstep.plan` needs the shapes of a model that may be larger than the memory here.",
        _KERAS,
    ),
    Patch(
        "keras_compat/graph.py: nodes_reported",
        ("keras/src/ops/node: Node.__init__",),
        _CONTEXT,
        "A call inside `lockstep.on` is found by the node that it makes.",
        _KERAS,
    ),
    Patch(
        "keras_compat/graph.py: report_functional_models",
        ("keras/src/models/functional: Functional.__init__",),
        _PROCESS,
        "A model that is made of placed calls gets its layout when it is made.",
        _KERAS,
    ),
    Patch(
        "training/inner_fit.py: lead_to_loop",
        ("keras: Model.fit.__closure__",),
        _PROCESS,
        "A tool keeps the function `keras.Model.fit`, and calls it later.",
        _KERAS,
    ),
    Patch(
        "processes/first_process_io.py: _without_words",
        ("keras/src/utils/io_utils: print_msg",),
        _CONTEXT,
        "Only the first process prints. A callback with `verbose=1` has no other switch.",
        _KERAS,
    ),
    Patch(
        "processes/first_process_io.py: _loops_of_all",
        ("keras/callbacks: CallbackList.__init__",),
        _CONTEXT,
        "An overridden `fit` gives its own callbacks to Keras's loop.",
        _KERAS,
    ),
    Patch(
        "engines/tensorflow/steps/custom_steps.py: CustomStep._summing",
        (
            "tensorflow: GradientTape.__enter__ GradientTape.__exit__ GradientTape.gradient",
            "tensorflow: GradientTape.jacobian GradientTape.batch_jacobian",
        ),
        _CONTEXT,
        "The tapes of a user's `train_step` return the gradients of the global batch.",
        "TensorFlow 2.21.0",
    ),
    Patch(
        "engines/tensorflow/steps/scratch_graph.py: ScratchGraph.open",
        ("tensorflow: gather",),
        _CONTEXT,
        "Layers of KerasHub call it on TensorFlow where they call `keras.ops` elsewhere.",
        "TensorFlow 2.21.0",
    ),
    Patch(
        "engines/tensorflow/steps/draws_by_rows.py: draws_of_one_device",
        (
            "tensorflow/python/ops/gen_stateless_random_ops_v2: stateless_random_normal_v2",
            "tensorflow/python/ops/gen_stateless_random_ops_v2: stateless_random_uniform_v2",
            "tensorflow/python/ops/gen_stateless_random_ops_v2: stateless_random_uniform_int_v2",
            "tensorflow/python/ops/gen_stateless_random_ops_v2: "
            "stateless_random_uniform_full_int_v2 stateless_truncated_normal_v2 "
            "stateless_random_gamma_v3",
            "tensorflow/python/ops/gen_stateless_random_ops: stateless_multinomial "
            "stateless_random_binomial stateless_random_poisson "
            "stateless_parameterized_truncated_normal",
        ),
        _CONTEXT,
        "A replica draws its rows of the random numbers that one device draws.",
        "TensorFlow 2.21.0",
    ),
    Patch(
        "keras_compat/variables.py: wrap_methods_of_torch",
        (
            "keras/src/backend/torch/layer: TorchLayer.parameters TorchLayer.named_parameters",
            "keras/src/backend/torch/layer: TorchLayer.state_dict TorchLayer.load_state_dict",
            "keras/src/backend/torch/layer: TorchLayer.zero_grad TorchLayer.requires_grad_",
            "keras/src/backend/torch/layer: TorchLayer._track_variables",
            "keras/src/backend/torch/layer: TorchLayer._post_track_variable",
        ),
        _PROCESS,
        "The tensors of a layer with sharded variables are the parts of one process.",
        _KERAS,
    ),
    Patch(
        "engines/jax/processes/joining.py: at_first_use",
        ("jax/_src/xla_bridge: backends",),
        "until JAX starts its devices",
        "Processes join before JAX starts its devices, and it has no hook for that.",
        "JAX 0.10.2",
    ),
    Patch(
        "engines/jax/steps/partition_fallbacks.py: pooling_whole",
        ("jax/extend/core/primitives: select_and_scatter_add_p.impl",),
        _CONTEXT,
        "XLA computes another gradient of a max pooling if its windows overlap between devices.",
        "JAX 0.10.2",
    ),
    Patch(
        "core/status.py: report_from_environment",
        ("sys: excepthook",),
        _PROCESS,
        "The launcher prints the error of the process that failed. The earlier hook runs too.",
        "Python 3.11 to 3.13",
    ),
    Patch(
        "tools/targets.py: _as_a_script",
        ("sys: argv",),
        _CONTEXT,
        "A script that is imported finds no arguments of the `lockstep` command.",
        "Python 3.11 to 3.13",
    ),
)


@contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace attributes of classes and modules inside the context, in all threads.

    Args:
        changes: Tuples of a class or module, the name of an attribute, and its value.
    """
    changes = list(changes)
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in changes]
    try:
        for change in changes:
            setattr(*change)
        yield
    finally:
        for change in reversed(before):
            setattr(*change)
