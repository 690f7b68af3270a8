"""Every row in each of several processes on PyTorch, which train one model together.

KERAS_BACKEND=torch lockstep run --processes 2 tests/third_party/in_processes.py [part of a name]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import lockstep

LEFT_OUT = "KerasTuner"
"""Its search is in a folder, from which a second process would go on. docs/limits.md"""


def main():
    lockstep.initialize()
    from tests.third_party.row import BOUNDS, compare
    from tests.third_party.test_rows import ROWS

    part = sys.argv[1] if len(sys.argv) > 1 else ""
    for name, row in ROWS.items():
        if part not in name or LEFT_OUT in name:
            continue
        result = compare(row)
        bound = BOUNDS[row.precision]
        print(f"{name}: weights {result.weights:.1e}, rest {result.rest:.1e}, bound {bound:.0e}")
        print(*(f"    {warned}" for warned in result.warned), sep="\n", flush=True)
        assert max(result.weights, result.rest) <= bound


if __name__ == "__main__":
    main()
