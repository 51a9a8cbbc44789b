"""A batch on Ray Data to be killed. Arguments: a checkpoint folder, a FIFO, and "block" or another word.

Row `FIRST` ends its actor, once. With "block" row `SECOND` writes a byte to the FIFO and never ends.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ramify as rm
from ramify.messages import Generate

ROWS = 2000
FIRST, SECOND = 600, 1400


@rm.function
def double(s, n):
    s += f"Twice {n} is" + rm.gen("x", schema=int)


class Doubling:
    """Makes the backend in an actor; notes each request in `folder`."""

    __qualname__ = "Doubling"

    def __init__(self, folder: Path, fifo: str | None = None) -> None:
        self.folder, self.fifo = folder, fifo

    def __call__(self) -> Any:
        return rm.ScriptedBackend(self._answer)

    def _answer(self, request: Generate) -> str:
        n = int(request.prompt[0].split()[1])
        with (self.folder / "requests").open("a") as file:
            file.write(f"{n}\n")
        died = self.folder / "died"
        if n == FIRST and not died.exists():
            died.touch()
            os._exit(9)
        if n == SECOND and self.fifo is not None:
            with open(self.fifo, "w") as file:
                file.write("!")
            threading.Event().wait()
        return str(2 * n)


def doubled(ray: Any, backend: Callable[[], Any], checkpoint: str) -> Any:
    rows = ray.data.range(ROWS, override_num_blocks=10).rename_columns({"id": "n"})
    return rm.ray.map_program(
        rows, double, engine=backend, checkpoint=checkpoint, concurrency=1, rows_per_batch=16
    )


if __name__ == "__main__":
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
    folder = Path(sys.argv[1])
    doubled(ray, Doubling(folder, sys.argv[2]), str(folder / "done")).materialize()
