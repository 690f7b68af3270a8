"""`python -m tests.conformance.table` measures every case, and writes docs/exactness.md.

With `--backend tensorflow` or `--backend torch` it writes docs/exactness-tensorflow.md or
docs/exactness-torch.md. A process for each measures lockstep in float32, lockstep in float64, and
stock Keras, whose distribution is global (it has none on PyTorch). The figures of each case are
kept in a folder, so that a run that was stopped continues.
"""

import argparse
import json
import os
import subprocess
import sys
import warnings
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

COUNTS = {"jax": [1, 2, 3, 4, 8], "tensorflow": [1, 2, 4], "torch": [1, 2, 3]}
STOCK_DEVICES = {"jax": 4, "tensorflow": 2}


def measure_lockstep(case):
    """The largest difference for every number of devices."""
    import lockstep
    from tests.conformance.cases.case import gaps, play

    one, row = play(case), {}
    for devices in COUNTS[_backend()]:
        far = gaps(one, play(case, partial(lockstep.distribute, devices=devices)))
        row[str(devices)] = max(far.values())
    return row


def measure_stock(case):
    """The largest difference of stock Keras over several devices, or what it raised."""
    from tests.conformance.cases.case import EVEN, RAGGED, gaps, play

    row = {}
    for name, sizes in (("ragged", RAGGED), ("even", EVEN)):
        one = play(case, sizes=sizes)
        try:
            row[name] = max(gaps(one, STOCK[_backend()](case, sizes)).values())
        except Exception as error:  # whatever it is, it is what the reader should see
            row[name] = type(error).__name__
    return row


def data_parallel(case, sizes):
    """What `keras.distribution` leaves on JAX."""
    import keras

    from tests.conformance.cases.case import play

    def distribute():
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=here))

    here = keras.distribution.list_devices()[: STOCK_DEVICES["jax"]]
    try:
        found = play(case, before=distribute, sizes=sizes)
        if keras.distribution.distribution() is None:
            sys.exit("The distribution was lost on the way, and nothing was measured.")
        return found
    finally:
        keras.distribution.set_distribution(None)


def mirrored(case, sizes):
    """What `MirroredStrategy` leaves on TensorFlow."""
    import tensorflow as tf

    from tests.conformance.cases.case import play

    names = [f"cpu:{number}" for number in range(STOCK_DEVICES["tensorflow"])]
    across = tf.distribute.ReductionToOneDevice()
    scope = tf.distribute.MirroredStrategy(names, cross_device_ops=across).scope()
    with ExitStack() as stack:

        def live(*args, **kwargs):
            try:
                return case.live(*args, **kwargs)
            finally:
                stack.close()  # variables are read outside

        inside = replace(case, live=live)
        return play(inside, before=lambda: stack.enter_context(scope), sizes=sizes)


STOCK = {"jax": data_parallel, "tensorflow": mirrored}


def cases(backend):
    """The cases that are measured, by family."""
    from tests.conformance.cases import FAMILIES
    from tests.conformance.test_cases import EXCLUDED
    from tests.conformance.worker import case_of

    return {
        family: {
            name: case_of(family, name, draws=backend == "jax")
            for name in members
            if name not in EXCLUDED.get(backend, ())
        }
        for family, members in FAMILIES.items()
    }


def _backend():
    return os.environ["KERAS_BACKEND"]


def measures(backend):
    """What is measured on this backend, by name."""
    found = {"lockstep": measure_lockstep, "float64": measure_lockstep}
    return {**found, "stock": measure_stock} if backend in STOCK else found


def measure(what, folder):
    """Measure every case that the folder does not have yet."""
    from lockstep.keras_compat import compute_in_float64

    warnings.simplefilter("ignore")
    if what == "float64":
        compute_in_float64()
    for family, members in cases(_backend()).items():
        for name, case in members.items():
            file = folder / what / f"{family}, {name}.json".replace("/", " ")
            if not file.exists():
                row = measures(_backend())[what](case)
                file.write_text(json.dumps(row))
                print(what, name, row, flush=True)


def render(folder, backend):
    """The page."""
    counts = COUNTS[backend]
    page = [_HEAD.format(**_about(backend))]
    for family, members in cases(backend).items():
        named = " | ".join(str(count) for count in counts)
        if not members:
            continue
        columns = f"| case | float64 | {named} |" + " stock | stock, even |" * (backend in STOCK)
        page += [f"## {family}\n", columns, "|---" + "|---:" * (columns.count("|") - 2) + "|"]
        for name in members:
            file = f"{family}, {name}.json".replace("/", " ")
            ours, double, *stock = (
                json.loads((folder / what / file).read_text()) for what in measures(backend)
            )
            cells = [_number(max(double.values()))]
            cells += [_number(ours[str(count)]) for count in counts]
            cells += [_number(row[sizes]) for row in stock for sizes in ("ragged", "even")]
            page.append(f"| {name} | {' | '.join(cells)} |")
        page.append("")
    return "\n".join(page)


def _number(value):
    if value is None:
        return ""
    if isinstance(value, str):
        return f"`{value}`"
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-")


def _about(backend):
    from importlib.metadata import version

    import tensorflow as tf

    from tests.conformance.cases.case import BOUND, EVEN, RAGGED

    own = {
        "jax": {
            "command": "python -m tests.conformance.table",
            "title": "Exactness",
            "framework": f"JAX {version('jax')}",
            "tool": "keras.distribution.DataParallel",
            "left_out": "",
        },
        "tensorflow": {
            "command": "python -m tests.conformance.table --backend tensorflow",
            "title": "Exactness on TensorFlow",
            "framework": f"TensorFlow {tf.__version__}",
            "tool": "tf.distribute.MirroredStrategy",
            "left_out": _LEFT_OUT,
        },
        "torch": {
            "command": "python -m tests.conformance.table --backend torch",
            "title": "Exactness on PyTorch",
            "framework": f"PyTorch {version('torch')}",
            "left_out": _LEFT_OUT,
        },
    }[backend]
    return {
        **own,
        "keras": version("keras"),
        "bound": f"{BOUND:.0e}",
        "last": COUNTS[backend][-1],
        "ragged": _batches(RAGGED),
        "stock": _ABOUT_STOCK.format(
            tool=own["tool"], devices=STOCK_DEVICES[backend], even=_batches(EVEN)
        )
        if backend in STOCK
        else "\nStock Keras has no distribution on PyTorch to compare with.\n",
    }


def _batches(sizes):
    last = sizes.rows % sizes.batch
    return f"{sizes.rows} rows in batches of {sizes.batch}" + (f", the last of {last}" * (last > 0))


_HEAD = """\
# {title}

Generated by `{command}`; no cell is written by hand. Measured on
virtual CPU devices with Keras {keras} and {framework}.

Each row is one case of the conformance tests: a small model, trained, evaluated and used to
predict. A cell is the largest absolute difference from the same run on one device by Keras
alone, over everything the run leaves: weights, optimizer state, logs, metrics, predictions.
Each run has {ragged}: no batch divides over 2, 3, 4 or 8
devices.

- *float64* is the proof: the largest difference over 1 to {last} devices when everything is
  computed in float64. It is at most {bound}, except where layers compute in half precision.
- The columns 1 to {last} are numbers of devices in float32, as users run it. Several devices add
  up the same numbers in another order. Usually that gives 1e-7. Kinks of ReLU and max pooling,
  and Adam on gradients near zero, turn the same rounding into more.
{left_out}{stock}"""

_LEFT_OUT = """\
- Cases of random numbers are left out, because replicas draw different ones, and so are a few
  that Keras cannot run or repeat on one device with this backend.
"""

_ABOUT_STOCK = """\
- *stock* is `{tool}` over {devices} devices on the same batches, or what it raised.
  *stock, even* is the same with {even}, which do divide.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", choices=("lockstep", "float64", "stock"))
    parser.add_argument("--backend", choices=COUNTS, default="jax")
    parser.add_argument("--folder", type=Path, help="where what is measured is kept")
    parser.add_argument("--page", type=Path, help="the page to write")
    options = parser.parse_args()
    own = "" if options.backend == "jax" else f"-{options.backend}"
    folder = options.folder or Path(f".exactness{own}")
    page = options.page or Path(f"docs/exactness{own}.md")
    os.environ["KERAS_BACKEND"] = options.backend
    os.environ.setdefault("LOCKSTEP_REHEARSE", str(max(COUNTS[options.backend])))
    import lockstep  # noqa: F401  (follows LOCKSTEP_REHEARSE before anything runs)

    if options.measure:
        measure(options.measure, folder)
        return
    for what in measures(options.backend):
        (folder / what).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.conformance.table", "--backend", options.backend]
    command += ["--folder", str(folder)]
    running = [
        subprocess.Popen(
            [*command, "--measure", what],
            env={**os.environ, "JAX_ENABLE_X64": str(int(what == "float64"))},
        )
        for what in measures(options.backend)
    ]
    failed = [process.wait() for process in running]
    if any(failed):
        sys.exit("A measurement failed; its traceback is above.")
    page.parent.mkdir(exist_ok=True)
    page.write_text(render(folder, options.backend))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main()
