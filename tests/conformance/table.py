"""`python -m tests.conformance.table` measures every case, and writes docs/exactness.md.

With `--backend tensorflow` or `--backend torch` it writes docs/exactness-tensorflow.md or
docs/exactness-torch.md. A process for each measures lockstep in float32, lockstep in float64,
sharded state in float64, and stock Keras, whose distribution is global (it has none on PyTorch).
The figures of each case are kept in a folder, so that a run that was stopped continues. That takes
about 100 minutes on two cores; `--only "batch norm"` measures the cases of that name,
`--kind sharded` one kind of figures, and both keep the rest of the page.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import warnings
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

COUNTS = {"jax": [1, 2, 3, 4, 8], "tensorflow": [1, 2, 4], "torch": [1, 2, 3]}
SHARDED_COUNTS = {"jax": [2, 3, 4, 8], "torch": [2, 3]}
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


def measure_sharded(case):
    """The largest difference for every number of devices, or None if nothing can be in shards."""
    import lockstep
    from tests.conformance.cases.case import gaps, play
    from tests.conformance.worker import check_shards, keep_processes_warm, shard_small_variables

    one, row = play(case), {}
    shard_small_variables()
    for devices in SHARDED_COUNTS[_backend()]:
        if _backend() == "torch":
            keep_processes_warm(devices)
        models = []

        def lay_out(model, devices=devices, models=models):
            models.append(lockstep.distribute(model, devices, state="sharded"))

        far = gaps(one, play(case, lay_out))
        row[str(devices)] = max(far.values()) if check_shards(models[0], devices) else None
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


KINDS = ("lockstep", "float64", "sharded", "stock")
FLOAT64 = ("float64", "sharded")
STOCK = {"jax": data_parallel, "tensorflow": mirrored}


def names(backend):
    """The names of the cases that are measured, by family."""
    from tests.conformance.cases import FAMILIES
    from tests.every_backend.test_cases import EXCLUDED

    return {
        family: [name for name in members if name not in EXCLUDED.get(backend, ())]
        for family, members in FAMILIES.items()
    }


def _backend():
    return os.environ["KERAS_BACKEND"]


def measures(backend):
    """What is measured on this backend, by name."""
    found = {"lockstep": measure_lockstep, "float64": measure_lockstep}
    if backend in SHARDED_COUNTS:
        found["sharded"] = measure_sharded
    return {**found, "stock": measure_stock} if backend in STOCK else found


def measure(what, folder, only):
    """Measure every case that the folder does not have yet."""
    from lockstep.keras_compat import compute_in_float64
    from tests.conformance.worker import case_of

    warnings.simplefilter("ignore")
    if what in FLOAT64:
        compute_in_float64()
    for family, members in names(_backend()).items():
        for name in members:
            file = folder / what / _file(family, name)
            if only in name and not file.exists():
                case = case_of(family, name, draws=_backend() == "jax")
                row = measures(_backend())[what](case)
                file.write_text(json.dumps(row))
                print(what, name, row, flush=True)


def _file(family, name):
    return f"{family}, {name}.json".replace("/", " ")


def columns(backend):
    """The columns of figures."""
    stock = ["stock", "stock, even"] if backend in STOCK else []
    sharded = ["sharded"] if backend in SHARDED_COUNTS else []
    return ["float64", *sharded, *map(str, COUNTS[backend]), *stock]


def measured(folder, backend):
    """The cells of each case that the folder has figures of, by column."""
    found = {}
    for family, members in names(backend).items():
        for name in members:
            row = {}
            for what in measures(backend):
                file = folder / what / _file(family, name)
                figures = json.loads(file.read_text()) if file.exists() else {}
                if what == "float64" and figures:
                    figures = {"float64": max(figures.values())}
                elif what == "sharded" and figures:
                    in_shards = [value for value in figures.values() if value is not None]
                    figures = {"sharded": max(in_shards, default="whole")}
                elif what == "stock" and figures:
                    figures = {"stock": figures["ragged"], "stock, even": figures["even"]}
                row |= {column: _number(value) for column, value in figures.items()}
            if row:
                found[family, name] = row
    return found


def read(page):
    """The versions of Keras and the framework on a page, and its cells as `measured` has them."""
    found, family, heads = {}, "", []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            family = line.removeprefix("## ")
        elif line.startswith("| case"):
            heads = cells[1:]
        elif line.startswith("| "):
            found[family, cells[0]] = dict(zip(heads, cells[1:], strict=True))
    versions = re.search(r"with Keras (\S+) and \w+ (\S+?)\.\s", page)
    return versions.groups(), found


def render(rows, backend, versions):
    """The page of some cells, with the versions of Keras and of the framework."""
    page = [_HEAD.format(**_about(backend, versions))]
    heads = columns(backend)
    for family, members in names(backend).items():
        here = [name for name in members if (family, name) in rows]
        if not here:
            continue
        page += [f"## {family}\n", f"| case | {' | '.join(heads)} |"]
        page.append("|---" + "|---:" * len(heads) + "|")
        for name in here:
            cells = [rows[family, name].get(column, "") for column in heads]
            page.append(f"| {name} | {' | '.join(cells)} |")
        page.append("")
    return "\n".join(page)


def _number(value):
    if isinstance(value, str):
        return f"`{value}`"
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-")


def versions_here(backend):
    """The versions of Keras and of the framework that are installed."""
    from importlib.metadata import version

    import tensorflow as tf

    return version("keras"), tf.__version__ if backend == "tensorflow" else version(backend)


def _about(backend, versions):
    from tests.conformance.cases.case import BOUND, EVEN, RAGGED

    option = "" if backend == "jax" else f" --backend {backend}"
    framework = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "PyTorch"}[backend]
    tools = {
        "jax": "keras.distribution.DataParallel",
        "tensorflow": "tf.distribute.MirroredStrategy",
    }
    own = {
        "command": f"python -m tests.conformance.table{option}",
        "title": f"Every case on {framework}",
        "framework": f"{framework} {versions[1]}",
        "left_out": _LEFT_OUT[backend],
    }
    return {
        **own,
        "keras": versions[0],
        "bound": f"{BOUND:.0e}",
        "last": COUNTS[backend][-1],
        "ragged": _batches(RAGGED),
        "sharded": _ABOUT_SHARDED.format(counts=_counts(SHARDED_COUNTS[backend]))
        if backend in SHARDED_COUNTS
        else "",
        "stock": _ABOUT_STOCK.format(
            tool=tools[backend], devices=STOCK_DEVICES[backend], even=_batches(EVEN)
        )
        if backend in STOCK
        else "\nStock Keras has no distribution on PyTorch to compare with.\n",
    }


def _counts(numbers):
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


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
{sharded}\
- The columns 1 to {last} are numbers of devices in float32, as users run it. Several devices add
  up the same numbers in another order. Usually that gives 1e-7. Kinks of ReLU and max pooling,
  and Adam on gradients near zero, turn the same rounding into more.
- An empty cell was not measured. `{command} --only "NAME"` measures
  the cases of that name. `python -m pytest tests/conformance --whole` runs every case in float64.
{left_out}{stock}"""

_ABOUT_SHARDED = """\
- *sharded* is the same with `state="sharded"` on {counts} devices. A variable of any size is in
  shards here, if its shape can be divided. `whole`: no variable of the case can be.
"""

_LEFT_OUT = {
    "jax": "",
    "tensorflow": """\
- The models have no dropout here. `tests/tensorflow/test_on_random_numbers.py` compares random
  numbers. A case that Keras cannot repeat on one device with this backend is left out.
""",
    "torch": """\
- Cases of random numbers are left out, because replicas draw different ones, and so are a few
  that Keras cannot run or repeat on one device with this backend.
""",
}

_ABOUT_STOCK = """\
- *stock* is `{tool}` over {devices} devices on the same batches, or what it raised.
  *stock, even* is the same with {even}, which do divide.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", choices=KINDS, help="what this process measures")
    parser.add_argument("--backend", choices=COUNTS, default="jax")
    parser.add_argument("--folder", type=Path, help="where what is measured is kept")
    parser.add_argument("--page", type=Path, help="the page to write")
    parser.add_argument("--kind", choices=KINDS, help="the one kind of figures to measure")
    parser.add_argument("--only", default="", help="a part of the names of the cases to measure")
    options = parser.parse_args()
    own = "" if options.backend == "jax" else f"-{options.backend}"
    folder = options.folder or Path(f".exactness{own}")
    page = options.page or Path(f"docs/exactness{own}.md")
    os.environ["KERAS_BACKEND"] = options.backend
    os.environ.setdefault("LOCKSTEP_REHEARSE", str(max(COUNTS[options.backend])))
    import lockstep  # noqa: F401  (follows LOCKSTEP_REHEARSE before anything runs)

    if options.measure:
        measure(options.measure, folder, options.only)
        return
    kinds = [options.kind] if options.kind else [*measures(options.backend)]
    for what in kinds:
        (folder / what).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.conformance.table", "--backend", options.backend]
    command += ["--folder", str(folder), "--only", options.only]
    running = [
        subprocess.Popen(
            [*command, "--measure", what],
            env={**os.environ, "JAX_ENABLE_X64": str(int(what in FLOAT64))},
        )
        for what in kinds
    ]
    failed = [process.wait() for process in running]
    if any(failed):
        sys.exit("A measurement failed; its traceback is above.")
    page.parent.mkdir(exist_ok=True)
    versions, rows = versions_here(options.backend), measured(folder, options.backend)
    if options.only or options.kind:
        before, kept = read(page.read_text())
        if before != versions:
            sys.exit(f"{page} is of {before}, and {versions} is here: measure every case.")
        rows = {case: kept.get(case, {}) | rows.get(case, {}) for case in kept | rows}
    page.write_text(render(rows, options.backend, versions))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main()
