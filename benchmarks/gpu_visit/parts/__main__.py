"""Runs one part: ``python -m benchmarks.gpu_visit.parts NAME --figures FILE [--tiny] [--seconds S]``.

NAME is a module of this folder, or a dotted name of any other that has ``run(figures)``.
Status 1: a case failed.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import traceback
from pathlib import Path

from benchmarks.gpu_visit.figures import Figures, place_of
from benchmarks.gpu_visit.processes import die_with_parent, leave_no_core


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--figures", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=math.inf, help="until the part is cut")
    args = parser.parse_args()
    die_with_parent()
    leave_no_core()
    figures = Figures(args.figures, args.name, tiny=args.tiny, seconds=args.seconds)
    try:
        with figures.attempt("the part itself"):
            name = args.name if "." in args.name else f"{__package__}.{args.name}"
            importlib.import_module(name).run(figures)
    except KeyboardInterrupt as error:
        traceback.print_exc()
        figures.add("the part itself", cut=place_of(error.__traceback__))
        return 130
    return int(figures.failures > 0)


if __name__ == "__main__":
    sys.exit(main())
