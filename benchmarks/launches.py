"""Programs of attention that a captured decoding step launches, beside those that have work. Needs no GPU.

    python -m benchmarks.launches [--shape benchmarks/configs/llama-3.1-8b.json] [--processors 132]

For each batch size and context: items of the plan, the graph's level, and programs (thread blocks) of the
attention kernel and the merge, in one layer. Counted from the plans and buffers that the runtime uses.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import torch

from ramify.kernels.triton.plan import attention_config
from ramify.kernels.triton.plan.attention_config import H100, Device
from ramify.kernels.triton.planner import Planner
from ramify.runtime.executor.decode_graphs import ladder
from ramify.runtime.executor.device_defaults import ON_CUDA
from ramify.runtime.model.shape.config import ModelShape
from ramify.runtime.model.shape.hf_config import config_from_hf

CONFIGS = Path(__file__).parent / "configs"
BATCHES = (1, 32, 256)
CONTEXTS = (1024, 8192, 131072)
PAGE_SIZE = ON_CUDA[0][1].page_size


class Programs(NamedTuple):
    """Of one layer in one decoding step.

    items, level : of the plan, and of the graph that holds it
    launched, working : programs of attention and merge
    """

    items: int
    level: int
    launched: int
    working: int


def count(planner: Planner, size: int, batch: int, context: int, positions: int) -> Programs:
    """`batch` decodes at `context` tokens in a graph of `size`; `positions` are those of the KV pages."""
    shape = planner.shape
    pages = -(-context // shape.page_size)
    table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages).numpy()
    cpu = torch.device("cpu")
    plan = planner.plan(table, list(range(batch + 1)), [context] * batch, cpu)
    form = planner.form(plan, size)
    room = planner.room(form, size, positions, None)
    if not room.load(plan):
        raise RuntimeError(f"{batch} decodes at {context} tokens fit no graph")
    working = shape.kv_heads * sum(len(launch.items) for launch in plan.launches)
    launched = shape.kv_heads * sum(len(launch.items) for launch in room.plan.launches)
    if plan.merge is not None:
        working += shape.heads * len(plan.merge.tokens)
    if room.plan.merge is not None:
        launched += shape.heads * len(room.plan.merge.tokens)
    return Programs(sum(len(launch.items) for launch in plan.launches), form.level, launched, working)


def planner_of(model: ModelShape, *, window: int = 0, deterministic: bool = False) -> Planner:
    return Planner(
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=torch.bfloat16,
        page_size=PAGE_SIZE,
        window=window,
        device=torch.device("cpu"),
        deterministic=deterministic,
        cascade=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=Path, default=CONFIGS / "llama-3.1-8b.json")
    parser.add_argument("--processors", type=int, default=H100.processors, help="multiprocessors of the GPU")
    parser.add_argument("--positions", type=int, default=1_000_000, help="of the KV pages")
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args()
    attention_config.H100 = Device(args.processors, H100.shared_bytes)
    model = config_from_hf(json.loads(args.shape.read_text()))
    planner = planner_of(model, deterministic=args.deterministic)
    print(f"{'batch':>6}{'context':>9}{'items':>7}{'level':>7}{'launched':>10}{'with work':>11}{'ratio':>7}")
    for batch in BATCHES:
        size = next(each for each in ladder(max(BATCHES)) if each >= batch)
        for context in CONTEXTS:
            positions = max(args.positions, batch * context)
            found = count(planner, size, batch, context, positions)
            ratio = found.launched / found.working
            print(
                f"{batch:6d}{context:9d}{found.items:7d}{found.level:7d}{found.launched:10d}"
                f"{found.working:11d}{ratio:7.2f}"
            )


if __name__ == "__main__":
    main()
