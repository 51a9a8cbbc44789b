"""A real server process for tests, from its start to its exit."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import NamedTuple


class Served(NamedTuple):
    url: str
    process: subprocess.Popen[str]
    lines: list[str]
    """The server's output and log, growing."""


@contextlib.contextmanager
def serve(*arguments: str, code: str = "") -> Iterator[Served]:
    """`ramify serve` on a free port, once it answers. The process runs `code` first.

    Batch files are in a folder of their own, never in the user's.
    """
    main = f"import sys\n{code}\nfrom ramify.cli.main import main\nsys.exit(main())"
    batches = tempfile.TemporaryDirectory()
    process = subprocess.Popen(
        [sys.executable, "-c", main, "serve", "--port", "0", "--batch-dir", batches.name, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r"http://\S+:\d+", line):
                break
        else:
            raise AssertionError("the server ended:\n" + "".join(lines))
        # Further output must not fill the pipe and stop the server.
        drain = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
        drain.start()
        yield Served(found.group(), process, lines)
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
        batches.cleanup()
        drain.join(10)
        process.stdout.close()
