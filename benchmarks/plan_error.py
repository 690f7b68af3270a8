"""The error of the peak that `lockstep plan` estimates, against what XLA compiles for a GPU.

    pip install -e ".[plan]"
    python benchmarks/plan_error.py --write

The models are those of the tests, of the benchmarks and of Keras Applications. The rules of the
estimate were chosen on others: eight dense layers, an LSTM, a transformer, a CNN with max pooling
and ResNet-50. No GPU is needed. `--write` writes the table into docs/plan.md, and the error into
the source. A name of models measures these alone.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import keras
import models
import numpy as np

import lockstep
from lockstep.core.devices import REPLICATED, SHARDED
from tests.conformance.zoo import OPTIMIZERS, ZOO

ROOT = Path(__file__).parents[1]
GPU = "h100"
LAYOUTS = ((1, REPLICATED), (4, REPLICATED), (4, SHARDED))
ROWS_OF_ZOO = 4096
ROWS = {"mlp": 256, "words": 128, "pictures": 256, "text": 64, "transformer": 1024}
APPLICATIONS = {"MobileNetV2": 32, "EfficientNetB0": 32}


def of_zoo(name):
    case = ZOO[name]
    model = case.build(case.dropout)
    model.compile(OPTIMIZERS["adamw"](), case.loss, metrics=case.metrics)
    return model, case.data(21, np.random.default_rng(1))


def classifier(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def application(name):
    return classifier(getattr(keras.applications, name)(weights=None, classifier_activation=None))


CASES = {name: (lambda name=name: of_zoo(name), ROWS_OF_ZOO) for name in ZOO}
CASES |= {
    f"benchmarks' {name}": (lambda name=name: classifier(getattr(models, name)()), rows)
    for name, rows in ROWS.items()
}
CASES |= {name: (lambda name=name: application(name), rows) for name, rows in APPLICATIONS.items()}


def peaks(make, rows, **options):
    counts = sorted({devices for devices, _ in LAYOUTS})
    keras.utils.clear_session(free_memory=False)
    found = lockstep.plan(make, devices=counts, batch_size=rows, **options)
    return {(each.devices, each.state): each.peak for each in found.layouts}


def rows_of_table(names):
    for name in names:
        make, rows = CASES[name]
        estimated, compiled = peaks(make, rows), peaks(make, rows, gpu=GPU)
        known = [each for each in LAYOUTS if compiled[each] is not None]
        if not known:
            print(f"{name}: XLA does not compile it without tuning.", file=sys.stderr)
            continue
        ratios = {each: estimated[each] / compiled[each] - 1 for each in known}
        most = max(compiled[each] for each in known) / 1e6
        cells = [f"{ratios[each]:+.0%}" if each in ratios else "" for each in LAYOUTS]
        print(f"| {name} | {most:,.1f} | {' | '.join(cells)} |", flush=True)
        yield f"| {name} | {most:,.1f} | {' | '.join(cells)} |", ratios.values()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=[*CASES])
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    lockstep.rehearse(1)
    lines, errors = zip(*rows_of_table(arguments.names), strict=True)
    errors = [each for several in errors for each in several]
    median = statistics.median(map(abs, errors))
    print(f"median {median:.1%}, {min(errors):+.0%} to {max(errors):+.0%} of {len(errors)}")
    if arguments.write:
        head = "| model | MB | " + " | ".join(f"{n} {state}" for n, state in LAYOUTS) + " |"
        table = "\n".join([head, "|---" + "|---:" * (len(LAYOUTS) + 1) + "|", *lines])
        replace("docs/plan.md", r"(?<=<!-- errors -->\n\n).*?(?=\n\n<!-- end -->)", table)
        source = "src/lockstep/tools/plan/liveness.py"
        replace(source, r"(?<=^MEDIAN_ERROR = ).*?$", f"{median:.2f}")
        replace(source, r"(?<=^WORST_ERROR = ).*?$", f"({min(errors):.2f}, {max(errors):.2f})")


def replace(path, pattern, text):
    file = ROOT / path
    file.write_text(re.sub(pattern, lambda _: text, file.read_text(), flags=re.M | re.S))


if __name__ == "__main__":
    main()
