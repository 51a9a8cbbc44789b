"""A batch to be killed: writes results to its first argument, and prints each row that it starts."""

from __future__ import annotations

import sys

import ramify as rm

ROWS = 400


@rm.function
def double(s, n):
    print(n, flush=True)
    s += f"Twice {n} is" + rm.gen("x")


if __name__ == "__main__":
    backend = rm.ScriptedBackend(lambda request: str(2 * int(request.prompt[0].split()[1])))
    summary = double.run_batch(
        ({"n": n} for n in range(ROWS)), out=sys.argv[1], concurrency=8, backend=backend
    )
    print("done", summary.rows, summary.skipped, flush=True)
