"""A visit to a machine with a GPU. Calls: A, first contact; B, figures; C, tests; D, trials.

Each call leaves its log and its figures in the folder, and prints a table last. Status 1: a part failed.
Status 2: there is no CUDA device.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from benchmarks.gpu_visit.calls import CALLS, Part
from benchmarks.gpu_visit.driver import Call
from benchmarks.gpu_visit.table import table
from ramify.machine_code import keep_triton_kernels

TINY_FACTOR = 10
"""Factor of a rehearsal's time limits: two cores interpret the kernels that a card runs."""


def parts_of(name: str, only: list[str] | None, seconds: float | None, *, tiny: bool) -> list[Part]:
    """The parts of the call `name` that are wanted. If `seconds` are given, they are shared out in proportion
    to the parts' own."""
    parts = [part for part in CALLS[name] if only is None or part.name in only]
    own = sum(part.seconds for part in parts)
    factor = seconds / own if seconds is not None and own else TINY_FACTOR if tiny else 1
    return [dataclasses.replace(part, seconds=part.seconds * factor) for part in parts]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_visit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("calls", nargs="+", choices=CALLS, help="in the order in which they run")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of logs and figures (default: gpu-visit, or gpu-visit-rehearsal)",
    )
    known = sorted({part.name for parts in CALLS.values() for part in parts})
    of_calls = "; ".join(f"{name}: {', '.join(part.name for part in CALLS[name])}" for name in CALLS)
    parser.add_argument("--only", nargs="+", metavar="PART", choices=known, help=of_calls)
    parser.add_argument("--tiny", action="store_true", help="rehearse on small shapes, without a GPU")
    parser.add_argument("--seconds", type=float, help="of each call, instead of its parts' own")
    args = parser.parse_args(arguments)
    # A rehearsal's figures go elsewhere, so that they do not mix with those of a card.
    out = args.out or Path("gpu-visit-rehearsal" if args.tiny else "gpu-visit")
    if args.seconds is not None and args.seconds <= 0:
        parser.error(f"--seconds {args.seconds:g}: a call needs more than 0 seconds")
    if not any(parts_of(name, args.only, None, tiny=args.tiny) for name in args.calls):
        parser.error(f"--only {' '.join(args.only)}: call {' or '.join(args.calls)} has no such part")
    if not args.tiny and (without := why_no_device()):
        print(f"gpu-visit needs a CUDA device, and torch finds none: {without}.", file=sys.stderr)
        return 2
    keep_triton_kernels()  # as engines do: all parts read and fill one cache
    failed, tables = False, []
    for name in args.calls:
        with Call(name, out, tiny=args.tiny) as call:
            ended = list(call.run(parts_of(name, args.only, args.seconds, tiny=args.tiny)))
            tables.append(table(name, ended))
            call.log.write(tables[-1])
        failed |= any(part.failed for part in ended)
        if call.stopped:
            break
    if len(tables) > 1:
        print(*tables, sep="\n", flush=True)
    return int(failed)


def why_no_device() -> str | None:
    import torch

    if torch.cuda.is_available():
        return None
    return f"torch.cuda.is_available() is False (torch {torch.__version__}). --tiny rehearses without one"


if __name__ == "__main__":
    sys.exit(main())
