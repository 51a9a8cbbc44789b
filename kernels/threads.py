"""Work on tensors, divided among threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")


def on_threads(work: Callable[[Item], None], items: Iterable[Item]) -> None:
    """Call `work` with each of `items`, on as many threads as torch uses; raises what it raises.

    Each thread runs torch's operations alone, without gradients: with a team of its own each, sixteen threads
    would be 256.
    """
    count = torch.get_num_threads()

    def alone() -> None:
        torch.get_num_threads()  # first: a thread's first operation takes the process's number
        torch.set_num_threads(1)

    def run(item: Item) -> None:
        with torch.inference_mode():
            work(item)

    try:
        with ThreadPoolExecutor(count, initializer=alone) as threads:
            list(threads.map(run, items))
    finally:
        torch.set_num_threads(count)  # it is the process's too, which later threads take
