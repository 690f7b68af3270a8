"""The peak of a step that `lockstep plan --gpu` compiles, against what a GPU here holds at most.

    pip install -e ".[plan]"
    python benchmarks/plan_on_a_gpu.py h100 --write

Each model takes three training steps on the GPU, in a process of its own, in which JAX allocates
as it needs, and then again in a second one. The first tunes kernels and writes its programs to
JAX's cache, the second reads them. The ratio is the peak of JAX's allocator in the second to the
compiled one. `--write` writes the table into docs/plan.md.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

import plan_error  # which sets Keras's backend

STEPS = 3
MODELS = [name for name in plan_error.CASES if "benchmarks'" in name or name[0].isupper()]


def measured(name):
    """Return the bytes that the first device held at most, in this process."""
    import jax
    import numpy as np

    make, rows = plan_error.CASES[name]
    model = make()
    shape = (rows, *model.input_shape[1:])
    x = np.zeros(shape, model.inputs[0].dtype)
    y = np.zeros((rows, *model.output_shape[1:-1]), "int32")
    model.fit(x, y, batch_size=rows, epochs=STEPS, verbose=0)
    statistics_of_device = jax.devices()[0].memory_stats()
    if not statistics_of_device:
        sys.exit(f"{jax.devices()[0]} does not tell its memory. Run this where JAX has a GPU.")
    return statistics_of_device["peak_bytes_in_use"]


def on_the_gpu(name):
    """Return the bytes held at most where kernels are tuned, and where they are known."""
    held = []
    with tempfile.TemporaryDirectory() as cache:
        options = {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, __file__, "--measure", name],
                env=os.environ | options,
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
            if done.returncode:
                sys.exit(done.returncode)
            held.append(int(done.stdout))
    return held


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("gpu", nargs="?", default="h100", help="as for lockstep plan --gpu")
    parser.add_argument("--names", nargs="+", default=MODELS, choices=MODELS, metavar="NAME")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.measure:
        print(measured(arguments.measure))
        return
    held = {name: on_the_gpu(name) for name in arguments.names}
    print(held, flush=True)
    plan_error.lockstep.rehearse(1)
    lines = ["| model | compiled, MB | held, MB | ratio | while tuning, MB |"]
    lines += ["|---|---:|---:|---:|---:|"]
    ratios = []
    for name, (tuning, most) in held.items():
        make, rows = plan_error.CASES[name]
        plan_error.keras.utils.clear_session(free_memory=False)
        found = plan_error.lockstep.plan(make, devices=1, batch_size=rows, gpu=arguments.gpu)
        compiled = found.layouts[0].peak
        if compiled is None:
            print(f"{name}: XLA does not compile it without tuning.", file=sys.stderr)
            continue
        ratios.append(most / compiled)
        cells = (
            f"{compiled / 1e6:,.1f} | {most / 1e6:,.1f} | {ratios[-1]:.2f} | {tuning / 1e6:,.1f}"
        )
        lines.append(f"| {name} | {cells} |")
        print(lines[-1], flush=True)
    words = f"One {arguments.gpu}: {statistics.median(ratios):.2f} in the median."
    if arguments.write:
        text = "\n".join([words, "", *lines])
        plan_error.replace("docs/plan.md", r"(?<=<!-- gpu -->\n\n).*?(?=\n\n<!-- end -->)", text)


if __name__ == "__main__":
    main()
