"""`python benchmarks/torch_tax.py`: a step on PyTorch against DDP over the same layers.

Two processes, each pinned to a core of its own; more of them (`--processes 3`) share the cores. One
team is `fit` of lockstep, whose rank 0 starts the other processes. The other team is a loop by hand
over the same Keras layers, in DistributedDataParallel, with the same optimizer of Keras and no
metrics, callbacks or `DataLoader`. The teams take turns, every other round backwards. A ratio is
the time of lockstep over that of the loop in the same round: its median, and the first and the
third quartile of all rounds. Beside the time on the clock stands the processor time of each rank:
what is left of the clock is waiting. `--steps 200` makes the first step of a `fit` count less. The
memory is the most that a process of the team held, less what it held before training.

`--calls` counts instead, in rank 0: the calls of Python between the begins of two steady steps of a
`fit`, and the files of lockstep that they pass, with a callback of the user's on batches and
without; and the calls of Keras alone.

`--traced` lets `fit` run with `jit_compile=True`: its steps are traced in the round before the
first one that counts. `--compiled` lets inductor compile them too: rounds before the first one go
on until it has.

`--alone` has one process, and Keras's own `fit` in place of the loop by hand.

`--checks` measures what it costs to compare steps with one device again: a `fit` with a callback of
the user's on batches, over the same `fit` with `LOCKSTEP_CHECK=0`, in turns. Try `--steps 1000`.
"""

import argparse
import os
import socket
import sys
import time
from functools import partial

from peers import spread
from rows import BATCH
from workers import Worker, answer, is_compiling, pin

NAMES = ("cnn", "transformer", "words", "pictures")


def made(name, size, steps):
    import keras
    import models
    import numpy as np
    import torch

    torch.set_num_threads(1)
    keras.utils.set_random_seed(0)
    model = getattr(models, name)()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    rows = size * rows_of(name) * steps
    shape = model.inputs[0].shape[1:]
    rng = np.random.default_rng(0)
    if name == "words":
        x, y = (rng.integers(0, models.WORDS, (rows, *shape)) for _ in range(2))
    else:
        x, y = rng.normal(size=(rows, *shape)).astype("float32"), rng.integers(0, 10, rows)
    return model, x, y


def rows_of(name):
    """The rows of each process in a step: a row of the language model is large."""
    return BATCH // 8 if name == "words" else BATCH


def lockstep_fit(name, rank, port, size, steps, traced=False, compiled=False):
    """Rounds of `fit` in rank 0, which is pinned; its workers take the other cores."""
    os.environ |= {"LOCKSTEP_REHEARSE": str(size), "LOCKSTEP_INDUCTOR": str(int(compiled))}
    import lockstep

    model, x, y = made(name, size, steps)
    cores = sorted(os.sched_getaffinity(0))
    lockstep.distribute(model, size)
    model.jit_compile = traced
    model.predict(x[:size], verbose=0)  # which starts the workers
    for number, other in enumerate(children(), 1):
        for thread in os.listdir(f"/proc/{other}/task"):
            os.sched_setaffinity(int(thread), {cores[number % len(cores)]})
    pin(0)
    whole = size * rows_of(name)
    return lambda: model.fit(x, y, batch_size=whole, shuffle=False, verbose=0)


def children():
    """The processes that this one has started."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(number) for number in file.read().split()]


def processor_seconds():
    """The processor time of this process and of each that it has started."""
    found = []
    for process in (os.getpid(), *children()):
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        found.append(sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK"))
    return found


def memory(name):
    """The bytes that this process and each that it has started hold (`VmRSS`), or held at most
    (`VmHWM`)."""
    found = []
    for process in (os.getpid(), *children()):
        with open(f"/proc/{process}/status") as file:
            (line,) = [line for line in file if line.startswith(f"{name}:")]
        found.append(int(line.split()[1]) * 1024)
    return found


def by_hand(name, rank, port, size, steps):
    """A loop over the rows of one rank in DistributedDataParallel."""
    pin(rank % os.cpu_count())
    model, x, y = made(name, size, steps)
    import torch

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    model.optimizer.build(model.trainable_variables)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    x, y = (torch.from_numpy(part) for part in (x, y))
    weights, rows = model.trainable_variables, rows_of(name)

    def run():
        total = 0.0
        model.train()
        for start in range(rank * rows, len(x), size * rows):
            inputs, targets = x[start : start + rows], y[start : start + rows]
            outputs = wrapped(inputs)
            model.zero_grad()
            loss = model.loss(targets, outputs)
            loss.backward()
            with torch.no_grad():
                model.optimizer.apply([weight.value.grad for weight in weights], weights)
            total += loss.detach() * len(inputs)
        return float(total)

    return run


def keras_alone(name, rank, port, size, steps):
    """Rounds of Keras's own `fit`, without lockstep."""
    pin(0)
    model, x, y = made(name, 1, steps)
    return lambda: model.fit(x, y, batch_size=rows_of(name), shuffle=False, verbose=0)


OURS, TRACED, COMPILED = "lockstep", "lockstep, traced", "lockstep, compiled"
BY_HAND, ALONE = "DistributedDataParallel", "Keras alone"
TEAMS = {
    OURS: lockstep_fit,
    TRACED: partial(lockstep_fit, traced=True),
    COMPILED: partial(lockstep_fit, traced=True, compiled=True),
    BY_HAND: by_hand,
    ALONE: keras_alone,
}


def worker(team, name, rank, port, size, steps):
    os.environ |= {"KERAS_BACKEND": "torch", "KERAS_TORCH_DEVICE": "cpu"}
    run = TEAMS[team](name, rank, port, size, steps)
    before = memory("VmRSS")
    run()
    while team == COMPILED and is_compiling():
        run()
    run()
    answer("")
    for _ in sys.stdin:
        start, busy = time.perf_counter(), processor_seconds()
        run()
        seconds = time.perf_counter() - start
        busy = [after - before for after, before in zip(processor_seconds(), busy, strict=True)]
        held = [most - least for most, least in zip(memory("VmHWM"), before, strict=True)]
        answer((seconds, max(held), busy))


def measured(name, rounds, size, steps, ours, peer):
    """Return the seconds of each round, the processor time of each rank, and the most bytes of a
    process, by team: ours and its peer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    same = ("--model", name, "--port", port, "--processes", size, "--steps", steps)
    teams = {
        team: [
            Worker(__file__, "--worker", team, "--rank", rank, *same)
            for rank in range(size if team == BY_HAND else 1)
        ]
        for team in (ours, peer)
    }
    for workers in teams.values():
        for each in workers:
            each.wait()
    found = {team: [] for team in teams}
    busy = {team: [] for team in teams}
    most = dict.fromkeys(teams, 0)
    for number in range(rounds):
        for team in list(teams) if number % 2 else reversed(teams):
            for each in teams[team]:
                each.ask("go")
            answers = [each.answer() for each in teams[team]]
            found[team].append(max(seconds for seconds, _, _ in answers))
            busy[team].append([rank for _, _, ranks in answers for rank in ranks])
            most[team] = max(held for _, held, _ in answers)
    for workers in teams.values():
        for each in workers:
            each.end()
        for each in workers:
            each.wait_for_end()
    return found, busy, most


def calls_of_a_step(name, size, own, traced=False):
    """Return the calls of Python between the begins of two steady steps, and lockstep's files.

    Args:
        name: The model.
        size: The number of processes, 0 for Keras alone.
        own: Whether a callback of the user's sees each batch.
        traced: Whether the step is traced; the calls of its graph do not count.
    """
    import keras

    import lockstep

    class Own(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            pass

    steps, source = 8, os.path.dirname(lockstep.__file__)
    model, x, y = made(name, size or 2, steps)
    options = {"batch_size": len(x) // steps, "shuffle": False, "verbose": 0}
    callbacks = [Own()] if own else []
    if size:
        lockstep.distribute(model, size)
        model.jit_compile = traced
    model.fit(x, y, callbacks=callbacks, **options)  # which starts the workers
    function, begun, calls, files = model.train_function, [], [], set()

    def profile(frame, event, argument):
        if event == "call":
            calls.append(0)
            place = os.path.relpath(frame.f_code.co_filename, source)
            if not place.startswith(".."):
                # What is private in Keras counts once, in whatever file it is.
                files.add("keras_compat" if place.startswith("keras_compat") else place)

    def steady(iterator):
        sys.setprofile(None)
        begun.append(0)
        if len(begun) == steps - 2:
            sys.setprofile(profile)
        return function(iterator)

    model.train_function = steady
    model.fit(x, y, callbacks=callbacks, **options)
    if size:
        lockstep.release(model)
    return len(calls), len(files)


def print_calls(name, size, traced):
    keras_alone, _ = calls_of_a_step(name, 0, False)
    without, files = calls_of_a_step(name, size, False, traced)
    own, more = calls_of_a_step(name, size, True, traced)
    print(
        f"{name}: {without:,} calls in {files} files; with a callback on batches {own:,} in {more};"
        f" Keras alone {keras_alone:,}",
        flush=True,
    )


def print_checks(name, size, steps, rounds):
    import keras

    import lockstep

    class Own(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            pass

    model, x, y = made(name, size, steps)
    options = {"batch_size": len(x) // steps, "shuffle": False, "verbose": 0}
    lockstep.distribute(model, size)
    model.fit(x, y, callbacks=[Own()], **options)
    found = {"1": [], "0": []}
    for number in range(rounds):
        for checked in ("1", "0") if number % 2 else ("0", "1"):
            os.environ["LOCKSTEP_CHECK"] = checked
            start, busy = time.perf_counter(), time.process_time()
            model.fit(x, y, callbacks=[Own()], **options)
            found[checked].append((time.perf_counter() - start, time.process_time() - busy))
    pairs = list(zip(found["1"], found["0"], strict=True))
    clock, processor = ([with_[n] / out[n] for with_, out in pairs] for n in range(2))
    print(
        f"{name}: a fit of {steps} steps with comparisons over one without: clock "
        f"{words(spread(clock))}, processor of rank 0 {words(spread(processor))}"
    )


def words(found):
    return f"{found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}]"


def per_step(seconds, steps):
    return f"{spread(seconds)[0] / steps * 1e3:.1f}"


def ranks_of(busy, steps):
    """The processor time of each rank in a step, in words."""
    ranks = (per_step(rank, steps) for rank in zip(*busy, strict=True))
    return f"of the processor {' and '.join(ranks)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="of a `fit`, and of a loop")
    parser.add_argument("--models", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--calls", action="store_true", help="count the calls of a step")
    parser.add_argument("--checks", action="store_true", help="cost of repeated comparisons")
    parser.add_argument("--traced", action="store_true", help="with jit_compile=True")
    parser.add_argument("--compiled", action="store_true", help="and compiled by inductor")
    parser.add_argument("--alone", action="store_true", help="one process, over Keras's `fit`")
    parser.add_argument("--worker")
    parser.add_argument("--model")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    if options.worker:
        team, name, rank, port = options.worker, options.model, options.rank, options.port
        worker(team, name, rank, port, options.processes, options.steps)
        return
    size, steps = 1 if options.alone else options.processes, options.steps
    if options.calls or options.checks:
        os.environ |= {"KERAS_BACKEND": "torch", "KERAS_TORCH_DEVICE": "cpu"}
        os.environ["LOCKSTEP_REHEARSE"] = str(size)
        for name in options.models:
            if options.calls:
                print_calls(name, size, options.traced)
            else:
                print_checks(name, size, steps, options.rounds)
        return
    load = os.getloadavg()[0]
    print(f"load {load:.1f}, {size} processes, {options.rounds} rounds of {steps} steps")
    for name in options.models:
        ours = COMPILED if options.compiled else TRACED if options.traced else OURS
        peer = ALONE if options.alone else BY_HAND
        found, busy, most = measured(name, options.rounds, size, steps, ours, peer)
        each = [a / b for a, b in zip(*found.values(), strict=True)]
        median, low, high = spread(each)
        times = ", ".join(
            f"{team} {per_step(seconds, steps)} ms ({ranks_of(busy[team], steps)})"
            for team, seconds in found.items()
        )
        held = ", ".join(f"{team} {bytes_ / 2**20:.0f} MiB" for team, bytes_ in most.items())
        print(f"{name}: {median:.3f} [{low:.3f}, {high:.3f}]; per step {times}; {held}", flush=True)


if __name__ == "__main__":
    main()
