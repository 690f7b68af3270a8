"""The peak of a step that `lockstep plan --gpu` compiles, against what a GPU here holds at most.

    pip install -e ".[plan]"
    python benchmarks/plan_on_a_gpu.py h100 --write

Each model takes three training steps on the GPU, in a process of its own, in which JAX allocates
as it needs. The ratio is the peak of JAX's allocator to the compiled one. `--write` writes the
table into docs/plan.md.
"""

import argparse
import os
import statistics
import subprocess
import sys

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
    model.fit(x, np.zeros(rows, "int32"), batch_size=rows, epochs=STEPS, verbose=0)
    statistics_of_device = jax.devices()[0].memory_stats()
    if not statistics_of_device:
        sys.exit(f"{jax.devices()[0]} does not tell its memory. Run this where JAX has a GPU.")
    return statistics_of_device["peak_bytes_in_use"]


def on_the_gpu(name):
    done = subprocess.run(
        [sys.executable, __file__, "--measure", name],
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.returncode)
    return int(done.stdout)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("gpu", nargs="?", default="h100", help="as for lockstep plan --gpu")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.measure:
        print(measured(arguments.measure))
        return
    held = {name: on_the_gpu(name) for name in MODELS}
    plan_error.lockstep.rehearse(1)
    lines, ratios = ["| model | compiled, MB | held, MB | ratio |", "|---|---:|---:|---:|"], []
    for name, most in held.items():
        make, rows = plan_error.CASES[name]
        compiled = plan_error.peaks(make, rows, gpu=arguments.gpu)[plan_error.LAYOUTS[0]]
        if compiled is None:
            print(f"{name}: XLA does not compile it without tuning.", file=sys.stderr)
            continue
        ratios.append(most / compiled)
        lines.append(f"| {name} | {compiled / 1e6:,.1f} | {most / 1e6:,.1f} | {ratios[-1]:.2f} |")
        print(lines[-1], flush=True)
    words = f"One {arguments.gpu}: {statistics.median(ratios):.2f} in the median."
    if arguments.write:
        text = "\n".join([words, "", *lines])
        plan_error.replace("docs/plan.md", r"(?<=<!-- gpu -->\n\n).*?(?=\n\n<!-- end -->)", text)


if __name__ == "__main__":
    main()
