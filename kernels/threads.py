"""Work on tensors, divided among threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from ramify.kernels.cpu.codegen.team import compute_alone

Item = TypeVar("Item")


def on_threads(work: Callable[[Item], None], items: Sequence[Item]) -> None:
    """Call `work` with each of `items`, on as many threads as torch uses; raises what it raises.

    Each thread runs torch's operations alone, without gradients: with a team of its own each, sixteen threads
    would be 256.
    """

    def run(item: Item) -> None:
        with torch.inference_mode():
            work(item)

    if len(items) == 1:
        run(items[0])
        return
    with ThreadPoolExecutor(torch.get_num_threads(), initializer=compute_alone) as threads:
        list(threads.map(run, items))
