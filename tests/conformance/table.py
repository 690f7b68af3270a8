"""`python -m tests.conformance.table` measures every case on one backend.

It writes the figures of the backend (`--backend`) into docs/exactness.json, and docs/exactness.md
from that file. One process each measures lockstep in float32, lockstep in float64, sharded state
in float64, and stock Keras, whose distribution is global (it has none on PyTorch). The figures of
each case are kept in a folder, so that a run that was stopped continues. That takes about 100
minutes on two cores; `--only "batch norm"` measures the cases of that name, `--kind sharded` one
kind of figures, and both keep the other figures.
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

PAGE = Path(__file__).parents[2] / "docs" / "exactness.md"
FIGURES = PAGE.with_suffix(".json")
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
COLUMNS = (
    ("JAX, float64", "jax", "float64"),
    ("sharded", "jax", "sharded"),
    ("float32", "jax", "float32"),
    ("DataParallel", "jax", "stock"),
    ("even", "jax", "stock, even"),
    ("TensorFlow, float32", "tensorflow", "float32"),
    ("MirroredStrategy", "tensorflow", "stock"),
    ("even", "tensorflow", "stock, even"),
    ("PyTorch, float64", "torch", "float64"),
    ("sharded", "torch", "sharded"),
    ("float32", "torch", "float32"),
)
"""The title, the backend and the kind of figures of each column."""

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


def all_names():
    """The names of all cases, by family."""
    from tests.conformance.cases import FAMILIES

    return FAMILIES


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


def read():
    """The versions of each backend, and the cells of each case by backend and column."""
    found = json.loads(FIGURES.read_text())
    rows = {
        (family, name): cells
        for family, members in found["cases"].items()
        for name, cells in members.items()
    }
    return found["versions"], rows


def write(versions, rows):
    """Keep the figures in the file beside the page, one case on each line."""
    families = []
    for family in dict.fromkeys(family for family, _ in rows):
        lines = [
            f"  {json.dumps(name)}: {json.dumps(cells)}"
            for (its, name), cells in rows.items()
            if its == family
        ]
        families.append(f" {json.dumps(family)}: {{\n" + ",\n".join(lines) + "\n }")
    text = f'{{"versions": {json.dumps(versions)},\n"cases": {{\n' + ",\n".join(families) + "\n}}\n"
    FIGURES.write_text(text)


def render(versions, rows):
    """The page: one table for each family, with columns for each backend."""
    page = [_HEAD.format(**_about(versions))]
    for family in dict.fromkeys(family for family, _ in rows):
        titles = " | ".join(title for title, _, _ in COLUMNS)
        page += [f"## {family}\n", f"| case | {titles} |"]
        page.append("|---" + "|---:" * len(COLUMNS) + "|")
        for (its, name), cells in rows.items():
            if its == family:
                shown = [_cell(cells.get(backend, {}), kind) for _, backend, kind in COLUMNS]
                page.append(f"| {name} | {' | '.join(shown)} |")
        page.append("")
    return "\n".join(page)


def _cell(cells, kind):
    """One cell; for float32, the largest difference over all numbers of devices."""
    if kind != "float32":
        return cells.get(kind, "")
    return max(
        (value for count, value in cells.items() if count.isdecimal()), key=float, default=""
    )


def _number(value):
    if isinstance(value, str):
        return f"`{value}`"
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-")


def versions_here(backend):
    """The versions of Keras and of the framework that are installed."""
    from importlib.metadata import version

    import tensorflow as tf

    return [version("keras"), tf.__version__ if backend == "tensorflow" else version(backend)]


def _about(versions):
    from tests.conformance.cases.case import BOUND, EVEN, RAGGED

    frameworks = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "PyTorch"}
    measured = [
        f"{frameworks[backend]} {framework} (Keras {keras}, {_counts(COUNTS[backend])} devices)"
        for backend, (keras, framework) in versions.items()
    ]
    return {
        "measured": ",\n".join(measured),
        "bound": f"{BOUND:.0e}",
        "ragged": _batches(RAGGED),
        "even": _batches(EVEN),
        "sharded": _counts(SHARDED_COUNTS["jax"]),
        "sharded_torch": _counts(SHARDED_COUNTS["torch"]),
        "jax_stock": STOCK_DEVICES["jax"],
        "tensorflow_stock": STOCK_DEVICES["tensorflow"],
    }


def _counts(numbers):
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _batches(sizes):
    last = sizes.rows % sizes.batch
    return f"{sizes.rows} rows in batches of {sizes.batch}" + (f", the last of {last}" * (last > 0))


_HEAD = """\
# Every case

Generated by `python -m tests.conformance.table`; no cell is written by hand. Measured on virtual
CPU devices with
{measured}.

Each row is one case of the conformance tests: a small model that is trained, evaluated and used to
predict. A cell is the largest absolute difference from the same run on one device with plain
Keras. It covers everything that the run leaves: weights, optimizer state, logs, metrics and
predictions. Each run has {ragged}. So no batch size is a
multiple of 2, 3, 4 or 8 devices.

- *float64* is the proof: the largest difference over all numbers of devices when everything is
  computed in float64. It is at most {bound}, except where layers compute in half precision.
- *sharded* is the same with `state="sharded"`, on {sharded} devices ({sharded_torch} on
  PyTorch). Here, variables of any size are sharded if their shape can be divided. `whole`: no
  variable of the case can be.
- *float32* is the largest difference over all numbers of devices in float32, as users run it.
  Several devices add up the same numbers in a different order. Usually that gives 1e-7. Kinks of
  ReLU and max pooling, and Adam on gradients near zero, amplify the same rounding.
  [The JSON file](exactness.json) has the difference for each number of devices.
- *DataParallel* is `keras.distribution.DataParallel` over {jax_stock} devices, and
  *MirroredStrategy* is `tf.distribute.MirroredStrategy` over {tensorflow_stock} devices, on the
  same batches; or the error that they raised. *even* is the same with {even},
  which can be split evenly. Plain Keras has no distribution on PyTorch.
- An empty cell was not measured. `python -m tests.conformance.table --backend jax --only "NAME"`
  measures the cases of that name. `python -m pytest tests/every_backend/test_cases.py --whole` runs
  every case in float64.
- On TensorFlow, the models have no dropout; `tests/tensorflow/test_on_random_numbers.py` compares
  random numbers. On PyTorch, cases with random numbers are left out, because replicas draw
  different ones. Cases that Keras cannot run or repeat on one device with a backend are left out.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", choices=KINDS, help="what this process measures")
    parser.add_argument("--backend", choices=COUNTS, default="jax")
    parser.add_argument("--folder", type=Path, help="where what is measured is kept")
    parser.add_argument("--kind", choices=KINDS, help="the one kind of figures to measure")
    parser.add_argument("--only", default="", help="a part of the names of the cases to measure")
    options = parser.parse_args()
    own = "" if options.backend == "jax" else f"-{options.backend}"
    folder = options.folder or Path(f".exactness{own}")
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
    versions, rows = read()
    here, new = versions_here(options.backend), measured(folder, options.backend)
    if options.only or options.kind:
        if versions[options.backend] != here:
            before = versions[options.backend]
            sys.exit(f"The figures are of {before}, but {here} is installed: measure every case.")
    else:
        for cells in rows.values():
            cells.pop(options.backend, None)
    versions[options.backend] = here
    every = {(family, name): {} for family, members in all_names().items() for name in members}
    for case, cells in every.items():
        cells.update(rows.get(case, {}))
        if case in new:
            cells[options.backend] = cells.get(options.backend, {}) | new[case]
    rows = {case: cells for case, cells in every.items() if cells}
    write(versions, rows)
    PAGE.write_text(render(versions, rows))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main()
