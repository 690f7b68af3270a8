"""`python benchmarks/two_processes.py`: what two processes of one device each lose by talking.

Each process is pinned to a core of its own; with `--platform gpu` it has a GPU of its own instead
(give it more `--steps` then, as a round is not to be too short). They take turns, every other round
backwards: two processes that do not know of one another (the control, which cancels the machine),
the same two where each waits for the other after every step and sends it no more than a byte (what
waiting for the slower of two costs by itself), two under lockstep, two that run a hand-written JAX
loop over the same collectives; and for PyTorch the same control, hand-written
DistributedDataParallel, Hugging Face Accelerate and Lightning Fabric. A ratio is the throughput of
a pair over that of its control in the same round; over one process, whose neighbour has nothing to
do then, it is the scaling efficiency, the throughput of two over twice that of one. Wall time,
because what is measured is how communication overlaps. A peer that is not here is said to be so.
"""

import argparse
import json
import os
import socket
import sys
import time

from hardware import add_platform, check, described, environment, require
from peers import ratio, spread, versions
from workers import Worker, answer, pin

ROWS = 32
"""Rows of a step in each process, unless others are asked for."""


def data(steps, rows):
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps * rows, 32, 32, 3)).astype("float32")
    return x, rng.integers(0, 10, steps * rows)


def keras_model():
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    made = [keras.Input((32, 32, 3))]
    for filters in (32, 64, 64):
        made += [layers.Conv2D(filters, 3, activation="relu"), layers.MaxPooling2D()]
    made += [layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(10)]
    model = keras.Sequential(made)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=["accuracy"])
    return model


def start_jax(platform, rank, address):
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ["JAX_NUM_CPU_DEVICES"] = "1"
    import jax

    if address:
        here = [0] if platform == "gpu" else None  # of those that it sees, whoever started it
        jax.distributed.initialize(address, 2, rank, local_device_ids=here)
    check(platform, f"JAX {jax.__version__}", jax.default_backend())
    assert jax.local_device_count() == 1, jax.local_devices()


def lockstep_fit(platform, rank, address, steps, rows):
    """Rounds of `fit` under lockstep, alone or with the other process."""
    start_jax(platform, rank, address)
    import lockstep

    model = lockstep.distribute(keras_model())
    rows *= 2 if address else 1
    x, y = data(steps, rows)
    return lambda: model.fit(x, y, batch_size=rows, shuffle=False, verbose=0)


def in_step(platform, rank, address, steps, rows):
    """`fit` alone, where a step ends when the other process has come to its end too."""
    start_jax(platform, rank, "")
    import keras

    other = connected(rank, address)

    class Wait(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            logs["loss"]  # which is there when the step is done
            other.sendall(b".")
            other.recv(1)

    import lockstep

    model = lockstep.distribute(keras_model())
    x, y = data(steps, rows)
    waits = [Wait()]
    return lambda: model.fit(x, y, batch_size=rows, shuffle=False, verbose=0, callbacks=waits)


def connected(rank, address):
    """A connection between the two processes."""
    host, port = address.split(":")
    if rank == 0:
        with socket.create_server((host, int(port))) as server:
            other, _ = server.accept()
    else:
        while True:
            try:
                other = socket.create_connection((host, int(port)))
                break
            except ConnectionRefusedError:
                time.sleep(0.1)
    other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return other


def hand_written_jax(platform, rank, address, steps, rows):
    """A jitted step over the mesh of both processes, and a plain loop."""
    start_jax(platform, rank, address)
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    model = keras_model()
    model.optimizer.build(model.trainable_variables)
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    by_rows = NamedSharding(mesh, PartitionSpec("batch"))

    def loss_of(trainable, non_trainable, x, y):
        outputs, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
        right = (outputs.argmax(-1) == y).sum()
        return model.loss(y, outputs), (non_trainable, right)

    def step(state, totals, x, y):
        trainable, non_trainable, slots = state
        (loss, (non_trainable, right)), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            trainable, non_trainable, x, y
        )
        trainable, slots = model.optimizer.stateless_apply(slots, gradients, trainable)
        return (trainable, non_trainable, slots), (totals[0] + loss * len(y), totals[1] + right)

    step = jax.jit(step, donate_argnums=(0, 1), out_shardings=everywhere)

    def place(value, layout=everywhere):
        host = np.asarray(value)
        return jax.make_array_from_callback(host.shape, layout, lambda index: host[index])

    groups = (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables)
    state = tuple([place(variable.value) for variable in group] for group in groups)
    rows *= 2
    x, y = data(steps, rows)

    def run():
        nonlocal state
        totals = (place(np.float32(0)), place(np.int32(0)))
        for start in range(0, len(x), rows):
            batch = x[start : start + rows], y[start : start + rows].astype("int32")
            state, totals = step(state, totals, *(place(part, by_rows) for part in batch))
        return float(np.asarray(totals[0].addressable_data(0)))

    return run


def in_torch(peer):
    """The same network in PyTorch, by hand or by one of `torch_loops`."""

    def prepare(platform, rank, address, steps, rows):
        import torch
        import torch_loops
        from torch import nn

        device = torch_loops.device_for(platform)
        if platform == "cpu":
            torch.set_num_threads(1)
        torch.manual_seed(0)
        made, channels = [], 3
        for filters in (32, 64, 64):
            made += [nn.Conv2d(channels, filters, 3), nn.ReLU(), nn.MaxPool2d(2)]
            channels = filters
        made += [nn.Flatten(), nn.Linear(64 * 2 * 2, 64), nn.ReLU(), nn.Linear(64, 10)]
        if address:
            port = address.split(":")[1]
            os.environ.update(torch_loops.environment(platform, rank, 2, port))
        model, optimizer, backward = getattr(torch_loops, peer)(
            nn.Sequential(*made).to(device), lambda p: torch.optim.SGD(p, 0.01, momentum=0.9)
        )
        x, y = (torch.from_numpy(part) for part in data(steps, rows))
        x = x.permute(0, 3, 1, 2).contiguous()
        if address:
            talking = torch.distributed.get_world_size()
            assert talking == 2, f"{peer} runs in {talking} processes"

        def run():
            total = right = 0
            for start in range(0, len(x), rows):
                batch = slice(start, start + rows)
                inputs, targets = x[batch].to(device), y[batch].to(device)
                optimizer.zero_grad()
                outputs = model(inputs)
                loss = nn.functional.cross_entropy(outputs, targets)
                backward(loss)
                optimizer.step()
                total += loss.detach() * len(inputs)
                right += (outputs.argmax(1) == targets).sum()
            return float(total)

        return run

    return prepare


GROUPS = {
    "one process": (lockstep_fit, 1, False),
    "independent": (lockstep_fit, 2, False),
    "independent, in step": (in_step, 2, True),
    "lockstep": (lockstep_fit, 2, True),
    "hand-written JAX": (hand_written_jax, 2, True),
    "one process, PyTorch": (in_torch("alone"), 1, False),
    "independent PyTorch": (in_torch("alone"), 2, False),
    "DistributedDataParallel": (in_torch("data_parallel"), 2, True),
    "Accelerate": (in_torch("accelerate"), 2, True),
    "Fabric": (in_torch("fabric"), 2, True),
}
"""What makes a round, how many processes there are, and whether they have a connection."""
RATIOS = [
    ("independent, in step", "independent"),
    ("lockstep", "independent"),
    ("lockstep", "independent, in step"),
    ("hand-written JAX", "independent"),
    ("lockstep", "hand-written JAX"),
    ("DistributedDataParallel", "independent PyTorch"),
    ("Accelerate", "independent PyTorch"),
    ("Fabric", "independent PyTorch"),
    ("independent", "one process"),
    ("lockstep", "one process"),
    ("independent PyTorch", "one process, PyTorch"),
    ("DistributedDataParallel", "one process, PyTorch"),
    ("Accelerate", "one process, PyTorch"),
    ("Fabric", "one process, PyTorch"),
]


def worker(name, platform, rank, address, steps, rows):
    """One process of a group: a round for each line that comes in, its seconds out."""
    if platform == "cpu":
        pin(rank)
    make, _, _ = GROUPS[name]
    try:
        run = make(platform, rank, address, steps, rows)
    except ImportError as error:
        answer(str(error))
        return
    run()
    answer("")
    for _ in sys.stdin:
        start = time.perf_counter()
        run()
        answer(time.perf_counter() - start)


class Group:
    """One process, or two, that wait for their turn.

    Attributes:
        missing: What keeps them from running, if anything.
    """

    def __init__(self, name, platform, steps, rows):
        _, processes, talking = GROUPS[name]
        address = ""
        if talking:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{free.getsockname()[1]}"
        arguments = ("--worker", name, "--steps", steps, "--rows", rows, "--address", address)
        arguments += ("--platform", platform, "--rank")
        self._workers = [
            Worker(__file__, *arguments, rank, **environment(platform, rank))
            for rank in range(processes)
        ]
        for each in self._workers:
            each.wait()
        self.missing = self._workers[0].said

    def round(self):
        """Seconds until the slowest is done."""
        for each in self._workers:
            each.ask("go")
        return max(each.answer() for each in self._workers)

    def end(self):
        for each in self._workers:
            each.end()
        for each in self._workers:
            each.wait_for_end()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="steps of a round")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of a step in each process")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    add_platform(parser)
    parser.add_argument("--worker")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--address", default="")
    options = parser.parse_args()
    if options.worker:
        given = options.platform, options.rank, options.address, options.steps, options.rows
        worker(options.worker, *given)
        return
    require(options.platform, 2)
    load = os.getloadavg()[0]
    groups = {name: Group(name, options.platform, options.steps, options.rows) for name in GROUPS}
    here = {name: group for name, group in groups.items() if not group.missing}
    rounds = []
    for number in range(options.rounds):
        turns = list(here) if number % 2 else reversed(here)
        rounds.append({name: here[name].round() for name in turns})
    for group in groups.values():
        group.end()
    if "lockstep" not in here:
        raise SystemExit(f"Nothing to compare with: {groups['lockstep'].missing}")
    found = {
        "device": described(options.platform),
        "load": load,
        "load after": os.getloadavg()[0],
        "rows per step": 2 * options.rows,
    }
    found |= {"platform": options.platform, "rounds": options.rounds, "versions": versions()}
    times = {name: [seconds[name] for seconds in rounds] for name in here}
    for name, values in times.items():
        found[f"{name}, ms per step"] = spread([value / options.steps * 1e3 for value in values])
    for of, over in RATIOS:
        if of in here and over in here:
            found[f"{of} / {over}"] = ratio(times[over], times[of])
    for name in groups.keys() - here.keys():
        found[f"{name}, left out"] = groups[name].missing
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        shown = f"{value[0]:.3f} [{value[1]:.3f}, {value[2]:.3f}]" if type(value) is list else value
        print(f"{name}: {shown}")


if __name__ == "__main__":
    main()
