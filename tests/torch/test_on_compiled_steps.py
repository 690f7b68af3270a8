"""Traced steps that inductor compiles beside the training, and those that it does not."""

import io
import os
import pickle
import subprocess
import sys
import time
import types

import keras
import numpy as np
import pytest
import torch
from keras import layers
from torch.fx import symbolic_trace

from lockstep.attach.attachment import session_of
from lockstep.engines.torch.ranks import traced_steps
from lockstep.engines.torch.traced import inductor, trace
from lockstep.engines.torch.traced.inductor import COMPILED, COMPILING, Compilation
from tests.agreement import assert_equal, both

X = np.random.default_rng(0).normal(size=(8, 4))
Y = np.random.default_rng(1).normal(size=(8, 2))
LONGEST = 400.0
"""Seconds after which a compilation has failed."""


@pytest.fixture(autouse=True)
def compiles(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_INDUCTOR", "1")
    monkeypatch.setattr(traced_steps, "_RUNS", 1)


def network(*inside):
    made = keras.Sequential([keras.Input((4,)), layers.Dense(5, activation="tanh"), *inside])
    made.add(layers.Dense(2))
    made.compile("adam", "mse", metrics=["mae"])
    return made


def dropping():
    return network(layers.BatchNormalization(), layers.Dropout(0.3), layers.GaussianNoise(0.1))


def traces(model):
    return list(session_of(model)._plans._traces._traces.values())


def runs_compiled(model):
    """Whether the first rank runs what was compiled of each step."""
    steps = session_of(model)._runner.rank.traces._steps.values()
    return [step._program is not step._module for step in steps]


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_compiled_step_leaves_what_one_device_leaves(devices):
    one, many = both(dropping, devices)
    many.jit_compile = True
    deadline, more, step = time.monotonic() + LONGEST, 3, 0
    while more:
        step += 1
        found = []
        for model in (one, many):
            torch.manual_seed(step)
            found.append(model.train_on_batch(X, Y, return_dict=True))
        assert_equal(*found)
        settled = traces(many) and not traces(many)[0].may_compile
        assert settled or time.monotonic() < deadline
        more -= bool(settled)
        if not settled:
            time.sleep(0.2)
    assert runs_compiled(many) == [True]
    assert_equal(one, many)


class Immediate(Compilation):
    """Stands for a compilation that has ended."""

    answer = COMPILED

    def __init__(self, module, inputs, ranks):
        self.program = lambda *given: self.changed(module(*given))
        self.end = lambda: None

    def state(self):
        return self.answer

    @staticmethod
    def changed(found):
        return found


def trained(monkeypatch, stands_for):
    monkeypatch.setattr(trace, "Compilation", stands_for)
    one, many = both(network, 1)
    many.jit_compile = True
    for model in (one, many):
        model.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=2 * (model is many))
    assert_equal(one, many)
    return many


class FirstEnds(Immediate):
    """The first one takes two looks: it is the form of a last batch, which comes rarely."""

    made = 0

    def __init__(self, module, inputs, ranks):
        super().__init__(module, inputs, ranks)
        type(self).made += 1
        self.looks = 2 if self.made == 1 else 0

    def state(self):
        self.looks -= 1
        return COMPILING if self.looks > 0 else COMPILED


def test_a_form_that_does_not_come_again_keeps_no_other_one_from_being_compiled(monkeypatch):
    monkeypatch.setattr(trace, "Compilation", FirstEnds)
    _, many = both(network, 1)
    many.jit_compile = True
    for rows in (4, 4, 8, 8, 8):  # the graph of four rows runs once
        many.train_on_batch(X[:rows], Y[:rows])
    assert runs_compiled(many) == [False, True]


class Wrong(Immediate):
    @staticmethod
    def changed(found):
        return [each + 0.01 if each.is_floating_point() else each for each in found]


class LosesValues(Immediate):
    @staticmethod
    def changed(found):
        return [each.nan_to_num() for each in found]


class Refused(Immediate):
    answer = "there is no C++ compiler, such as g++"


class Impossible(Compilation):
    def __init__(self, module, inputs, ranks):
        raise OSError("No space left on device")


BEGIN = "train steps are compiled from now on\n"
NOT = "train steps are not compiled: "


@pytest.mark.parametrize(
    ("stands_for", "is_used", "line"),
    [
        (Immediate, True, BEGIN),
        (Wrong, False, f"{NOT}the value of 'loss' differs by"),
        (LosesValues, False, f"{NOT}what is compiled makes other values of NaN or infinity\n"),
        (Refused, False, f"{NOT}there is no C++ compiler, such as g++\n"),
        (Impossible, False, f"{NOT}No space left on device\n"),
    ],
)
def test_a_line_says_when_compiled_steps_begin_or_why_not(
    monkeypatch, capsys, stands_for, is_used, line
):
    many = trained(monkeypatch, stands_for)
    assert runs_compiled(many) == [is_used]
    assert f"\nlockstep: {line}" in capsys.readouterr().out


class Counts(Immediate):
    """Counts the runs of a program."""

    runs = 0

    @classmethod
    def changed(cls, found):
        cls.runs += 1
        return found


def words():
    made = keras.Sequential([keras.Input((3,)), layers.Embedding(5, 4), layers.Flatten()])
    made.add(layers.Dense(2))
    made.compile("sgd", "mse")
    return made


def counted(monkeypatch, build, batches, between=lambda model: None):
    """How often a program ran in each step, by the side of Keras; `None` for an error."""
    monkeypatch.setattr(trace, "Compilation", Counts)
    one, many = both(build, 1)
    many.jit_compile = True
    for _ in range(5):
        for model in (one, many):
            model.train_on_batch(batches[0], Y)
    between(many)
    found = []
    for batch in batches:
        before = Counts.runs
        for model in (one, many):
            if batch.max() > 4:
                with pytest.raises(IndexError):
                    model.train_on_batch(batch, Y)
            else:
                model.train_on_batch(batch, Y)
        found.append(Counts.runs - before)
    assert_equal(one, many)
    return found


def test_an_index_out_of_range_is_the_error_of_pytorch(monkeypatch):
    """What is compiled for CPUs ends the process there."""
    right = np.random.default_rng(0).integers(0, 5, size=(8, 3)).astype("float32")
    wrong = right.copy()
    wrong[7] = 9
    before, at_error, after = counted(monkeypatch, words, [right, wrong, right])
    assert before
    assert after
    assert not at_error


def test_weights_in_other_strides_run_by_the_graph(monkeypatch):
    """What is compiled raises an error for them."""

    def turn(model):
        kernel = model.layers[0].kernel.value
        kernel.data = kernel.data.t().contiguous().t()

    small = np.minimum(np.abs(X), 4)
    assert counted(monkeypatch, network, [small, small], turn) == [0, 0]


class Divides(layers.Layer):
    def call(self, inputs):
        whole = keras.ops.cast(inputs, "int32")
        return inputs + keras.ops.cast(whole % (whole * whole + 1), inputs.dtype)


def test_a_division_of_integers_is_not_compiled(monkeypatch, capsys):
    """A zero would end the process."""
    monkeypatch.setattr(trace, "Compilation", Immediate)
    _, many = both(lambda: network(Divides()), 1)
    many.jit_compile = True
    many.fit(X, Y, batch_size=4, epochs=3, verbose=2)
    assert f"{NOT}it divides integers by a tensor" in capsys.readouterr().out


class Chooses(layers.Layer):
    def call(self, inputs):
        chosen = keras.random.categorical(keras.ops.stop_gradient(inputs), 1, seed=1)
        return inputs + keras.ops.cast(chosen, inputs.dtype)


def test_an_operation_that_refuses_nan_is_no_error_of_the_user(monkeypatch, capsys):
    monkeypatch.setattr(trace, "Compilation", Immediate)
    _, many = both(lambda: network(Chooses()), 1)
    many.jit_compile = True
    many.fit(X, Y, batch_size=4, epochs=3, verbose=2)
    assert f"\nlockstep: {BEGIN}" in capsys.readouterr().out


class Refuses(Immediate):
    @staticmethod
    def changed(found):
        if any(each.isnan().any() for each in found):
            raise ValueError("NaN")
        return found


def test_what_refuses_nan_where_its_graph_does_not_is_not_used(monkeypatch):
    many = trained(monkeypatch, Refuses)
    assert runs_compiled(many) == [False]


def test_the_variable_leaves_it_out(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_INDUCTOR", "0")
    many = trained(monkeypatch, None)  # which cannot be called
    assert runs_compiled(many) == [False]


def test_a_graph_that_travels_draws_and_computes_the_same():
    model, kind = dropping(), "train"
    batch = torch.from_numpy(X).float(), torch.from_numpy(Y).float()
    model.train_on_batch(X, Y)
    step = trace.TracedStep(model, kind, batch, None)
    assert step.draws
    rows, constants = inductor._packed(step._module)
    given = [*(variable.value.detach() for variable in step.variables), *batch]
    other = inductor._unpacked(rows, len(given) + len(constants))
    found = []
    for run in (lambda: step._module(*given), lambda: other(*given, *constants)):
        torch.manual_seed(1)
        found.append([*run(), torch.rand(1)])
    assert all(map(torch.equal, *found))
    after = [row[1][-1] for row in rows if row[0] == "lockstep.in_order.default"]
    assert after[0] is None
    assert len(set(after)) == len(after)  # each needs another one


def test_an_exchange_needs_the_one_before_it():
    from lockstep.engines.torch.traced.graph import _SUM, _keep_order_of_exchanges

    module = symbolic_trace(lambda one, other: (_SUM(one), _SUM(other)))
    _keep_order_of_exchanges(module.graph)
    first, second = (node for node in module.graph.nodes if node.target is _SUM)
    assert (first.args[1:], second.args[1:]) == ((), (first,))


STARTS = """
import os, torch
from torch.fx import symbolic_trace
from lockstep.engines.torch.traced.inductor import Compilation
made = Compilation(symbolic_trace(lambda x: (torch.ops.aten.neg.default(x),)), [torch.ones(2)], 1)
print(made._folder.name, made._process.pid, flush=True)
os._exit(0)
"""


def test_nothing_is_left_of_a_compilation_whose_training_has_ended():
    command = [sys.executable, "-c", STARTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    folder, process = done.stdout.split()
    deadline = time.monotonic() + LONGEST
    while os.path.exists(folder) or os.path.exists(f"/proc/{process}"):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_memory_format_is_named_by_its_own_module(monkeypatch):
    """A script that imports PyTorch was named, and the other process does not have it."""
    script = types.ModuleType("__mp_main__")
    script.torch = torch
    others = {name: each for name, each in sys.modules.items() if name.startswith("__")}
    monkeypatch.setattr(sys, "modules", {"__mp_main__": script, **others, **sys.modules})
    written = io.BytesIO()
    inductor._Pickler(written).dump([torch.preserve_format])
    assert b"__mp_main__" not in written.getvalue()
    assert pickle.loads(written.getvalue()) == [torch.preserve_format]


def test_a_process_that_dies_is_a_reason(monkeypatch):
    monkeypatch.setattr(inductor, "_START", "raise SystemExit(3)")
    module = symbolic_trace(lambda each: (torch.ops.aten.neg.default(each),))
    compilation = Compilation(module, [torch.ones(2)], 1)
    compilation._process.wait()
    assert "exit status 3" in compilation.state()
    compilation.end()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("InvalidCxxCompiler: No working C++ compiler found in x", "there is no C++ compiler"),
        ("Cannot find a working triton installation. See y", "Triton is not installed"),
        ("first\nx.h:1: fatal error: Python.h: No such file\nlast", "x.h:1: fatal error"),
        ("", "ValueError"),
    ],
)
def test_the_other_process_leaves_its_reason(monkeypatch, tmp_path, error, reason):
    def fail(*arguments):
        raise ValueError(error)

    monkeypatch.setattr(inductor, "compile_to_file", fail)
    module = symbolic_trace(lambda each: (torch.ops.aten.neg.default(each),))
    rows, _ = inductor._packed(module)
    form = (2,), (1,), torch.float32, torch.device("cpu")
    (tmp_path / "graph").write_bytes(inductor.pickle.dumps((rows, [form], (1, False))))
    inductor.main(str(tmp_path))
    assert (tmp_path / "reason").read_text().startswith(reason)
