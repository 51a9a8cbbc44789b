"""Runs one part: ``python -m benchmarks.gpu_visit.parts NAME --figures FILE [--tiny]``.

NAME is a module of this folder, or a dotted name of any other that has ``run(figures)``.
Status 1: a case failed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from pathlib import Path
from types import TracebackType

from benchmarks.gpu_visit.figures import Figures
from benchmarks.gpu_visit.processes import die_with_parent, leave_no_core

ROOT = Path(__file__).parents[3]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--figures", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    die_with_parent()
    leave_no_core()
    figures = Figures(args.figures, args.name, tiny=args.tiny)
    try:
        with figures.attempt("the part itself"):
            name = args.name if "." in args.name else f"{__package__}.{args.name}"
            importlib.import_module(name).run(figures)
    except KeyboardInterrupt as error:
        traceback.print_exc()
        figures.add("the part itself", cut=place_of(error.__traceback__))
        return 130
    return int(figures.failures > 0)


def place_of(trace: TracebackType | None) -> str:
    """The innermost of our own lines, and where it went from there."""
    frames = traceback.extract_tb(trace)
    names = [f"{frame.name} ({frame.filename.removeprefix(f'{ROOT}/')}:{frame.lineno})" for frame in frames]
    own = [name for name, frame in zip(names, frames, strict=True) if _is_own(Path(frame.filename))]
    return " > ".join(dict.fromkeys([*own[-1:], *names[-1:]]))


def _is_own(path: Path) -> bool:
    return path.is_relative_to(ROOT) and not path.is_relative_to(sys.prefix)


if __name__ == "__main__":
    sys.exit(main())
