"""The fastest attention tiles on this card: each candidate on a decode or a prefill, beside today's choice.

    python -m benchmarks.tune_attention [--head-dim 128] [--page-size 64] [--seconds 0.1]

For `kernels/triton/plan/attention_config.py`. Candidates are compared in turn, from an empty cache, as in
`benchmarks.kernels`, on random numbers. Candidates that do not fit the device are counted. Candidates whose
result differs from that of the chosen tile are named. Without a CUDA device it exits with status 2.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from functools import partial

import torch

from benchmarks.gpu_timing import Timer
from benchmarks.kernels import MOST_ERROR
from ramify.kernels.triton.attention import plan_attention, plan_shape, run_plan
from ramify.kernels.triton.plan.attention_config import Tile, device_of, tiles
from tests.kernels.kernel_cases.attention import Inputs, Lengths, Model
from tests.kernels.kernel_cases.base import Call, Work, reason

CASES = {16: Lengths(1, (4096,) * 64), 64: Lengths(16, (8192,) * 8), 128: Lengths(8192, (8192,))}
"""Rows of the tile → its case: a decode, short chunks over a long prefix, a prefill."""


def candidates(rows: int, head_dim: int) -> list[Tile]:
    columns = [size for size in (16, 32, 64, 128) if size * head_dim <= 16384]
    return [
        Tile(rows, *rest)
        for rest in itertools.product(columns, (2, 4, 8) if rows < 128 else (4, 8), (1, 2, 3))
    ]


def caller(inputs: Inputs, tile: Tile, *, deterministic: bool) -> Call:
    shape = plan_shape(inputs.q, inputs.k, window=0, deterministic=deterministic)._replace(tiles=(tile,))
    plan = plan_attention(inputs.starts, inputs.lengths.lens, shape, inputs.device)
    return lambda: run_plan(plan, inputs.q, inputs.k, inputs.v, inputs.table, inputs.out, scale=inputs.scale)


def tune(
    lengths: Lengths, model: Model, now: Tile, timer: Timer, *, deterministic: bool, seconds: float
) -> None:
    """Print the fastest candidates beside `now`, the present choice.

    seconds : time for measuring each candidate
    """
    inputs = Inputs(lengths, model, timer.device)
    calls = {
        str(tile): caller(inputs, tile, deterministic=deterministic)
        for tile in {now, *candidates(now.rows, model.head_dim)}
    }
    print(f"\n{'deterministic ' if deterministic else ''}{lengths.new} new of {lengths.lens[0]}:")
    work = Work(calls[str(now)], 0, rivals=calls, reset=partial(inputs.out.fill_, torch.nan))
    try:
        errors, failed = work.errors()
    except Exception as error:  # compilers and drivers fail with types of their own
        print(f"  the chosen one, {now}: {reason(error)}")
        return
    right = {name: calls[name] for name, error in errors.items() if error <= MOST_ERROR}
    times, unfit = timer.medians(right, seconds=seconds, least=5)
    for name in sorted(times, key=times.__getitem__)[:6]:
        print(f"  {times[name] * 1e6:>9.1f} us  {name}{'  <- chosen' * (name == str(now))}")
    for name in errors.keys() - right.keys():
        print(f"  wrong by {errors[name]:.2g}: {name}")
    chosen = times.get(str(now), float("nan"))
    print(f"  chosen: {chosen * 1e6:.1f} us; {len(failed) + len(unfit)} do not fit")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=Model.page_size)
    parser.add_argument("--seconds", type=float, default=0.1, help="of measuring for each candidate")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("tune_attention needs a CUDA device: torch.cuda.is_available() is False.", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    timer, model = Timer(), Model(head_dim=args.head_dim, page_size=args.page_size)
    for deterministic in (False, True):
        chosen = tiles(args.head_dim, torch.bfloat16, device_of(timer.device), deterministic=deterministic)
        for (rows, lengths), now in itertools.product(CASES.items(), chosen):
            if now.rows == rows or deterministic:
                tune(lengths, model, now, timer, deterministic=deterministic, seconds=args.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
