"""`python benchmarks/torch_tax.py`: a step on PyTorch against DDP over the same layers.

Two processes, each pinned to a core of its own. One pair is `fit` of lockstep, whose rank 0 starts
the other process. The other pair is a loop by hand over the same Keras layers, in
DistributedDataParallel, with the same optimizer of Keras and no metrics, callbacks or `DataLoader`.
The pairs take turns, every other round backwards. A ratio is the time of lockstep over that of the
loop in the same round: its median, and the first and the third quartile of all rounds.
"""

import argparse
import os
import socket
import sys
import time

from peers import spread
from rows import BATCH
from workers import Worker, answer, pin

NAMES = ("cnn", "transformer", "pictures")


def made(name):
    import keras
    import models
    import numpy as np
    import torch

    torch.set_num_threads(1)
    keras.utils.set_random_seed(0)
    model = getattr(models, name)()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    shape = model.inputs[0].shape[1:]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2 * BATCH * STEPS, *shape)).astype("float32")
    return model, x, rng.integers(0, 10, len(x))


STEPS = 20


def lockstep_fit(name, rank, port):
    """Rounds of `fit` in rank 0, which is pinned; its worker takes the other core."""
    os.environ["LOCKSTEP_REHEARSE"] = "2"
    import lockstep

    model, x, y = made(name)
    cores = sorted(os.sched_getaffinity(0))
    lockstep.distribute(model, 2)
    model.predict(x[:2], verbose=0)  # which starts the worker
    (other,) = children()
    for thread in os.listdir(f"/proc/{other}/task"):
        os.sched_setaffinity(int(thread), {cores[1]})
    pin(0)
    return lambda: model.fit(x, y, batch_size=2 * BATCH, shuffle=False, verbose=0)


def children():
    """The processes that this one has started."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(number) for number in file.read().split()]


def by_hand(name, rank, port):
    """A loop over the rows of one rank in DistributedDataParallel."""
    pin(rank)
    model, x, y = made(name)
    import torch

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model.optimizer.build(model.trainable_variables)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    x, y = (torch.from_numpy(part) for part in (x, y))
    weights = model.trainable_variables

    def run():
        total = 0.0
        model.train()
        for start in range(rank * BATCH, len(x), 2 * BATCH):
            inputs, targets = x[start : start + BATCH], y[start : start + BATCH]
            outputs = wrapped(inputs)
            model.zero_grad()
            loss = model.loss(targets, outputs)
            loss.backward()
            with torch.no_grad():
                model.optimizer.apply([weight.value.grad for weight in weights], weights)
            total += loss.detach() * len(inputs)
        return float(total)

    return run


PAIRS = {"lockstep": (lockstep_fit, 1), "DistributedDataParallel": (by_hand, 2)}


def worker(pair, name, rank, port):
    os.environ |= {"KERAS_BACKEND": "torch", "KERAS_TORCH_DEVICE": "cpu"}
    run = PAIRS[pair][0](name, rank, port)
    run()
    answer("")
    for _ in sys.stdin:
        start = time.perf_counter()
        run()
        answer(time.perf_counter() - start)


def measured(name, rounds):
    """Return the seconds of each round, by pair."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pairs = {
        pair: [
            Worker(__file__, "--worker", pair, "--model", name, "--rank", rank, "--port", port)
            for rank in range(processes)
        ]
        for pair, (_, processes) in PAIRS.items()
    }
    for workers in pairs.values():
        for each in workers:
            each.wait()
    found = {pair: [] for pair in pairs}
    for number in range(rounds):
        for pair in list(pairs) if number % 2 else reversed(pairs):
            for each in pairs[pair]:
                each.ask("go")
            found[pair].append(max(each.answer() for each in pairs[pair]))
    for workers in pairs.values():
        for each in workers:
            each.end()
        for each in workers:
            each.wait_for_end()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--worker")
    parser.add_argument("--model")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.model, options.rank, options.port)
        return
    print(f"load {os.getloadavg()[0]:.1f}, {2 * BATCH} rows a step, {options.rounds} rounds")
    for name in options.models:
        found = measured(name, options.rounds)
        each = [a / b for a, b in zip(*found.values(), strict=True)]
        median, low, high = spread(each)
        steps = {pair: spread(seconds)[0] / STEPS * 1e3 for pair, seconds in found.items()}
        times = ", ".join(f"{pair} {ms:.1f} ms" for pair, ms in steps.items())
        print(f"{name}: {median:.3f} [{low:.3f}, {high:.3f}] ({times} per step)", flush=True)


if __name__ == "__main__":
    main()
