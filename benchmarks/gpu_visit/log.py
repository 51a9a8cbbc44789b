"""The log of a call: processes append to it themselves, and a thread shows on the terminal whatever is
appended."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import BinaryIO

LOG_BYTES = 15 << 20
"""Most bytes of a log: below 16 MiB, the largest file that a lent machine returns."""
PIECE = 1 << 20


class Log:
    """A file that grows at its end.

    Parts write to the file itself: the last words of a dying part are kept even if nobody reads the terminal
    or this process is already gone.

    most : bytes. A longer log is cut to its first quarter and its newest half.
    """

    def __init__(self, path: Path, terminal: BinaryIO, *, most: int = LOG_BYTES) -> None:
        self.path, self._terminal, self._most = path, terminal, most
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._shown = os.fstat(self._file).st_size
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="log", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._file

    def write(self, text: str) -> None:
        """Append whole lines. If a part has left a line open, it is ended first."""
        size = os.fstat(self._file).st_size
        is_open = size and os.pread(self._file, 1, size - 1) != b"\n"
        os.write(self._file, b"\n" * bool(is_open) + text.encode() + b"\n")

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        os.close(self._file)

    def _follow(self) -> None:
        while not self._closed.wait(0.05):
            self._show()
        self._show()

    def _show(self) -> None:
        while piece := os.pread(self._file, PIECE, self._shown):
            self._shown += len(piece)
            try:
                self._terminal.write(piece)
                self._terminal.flush()
            except (OSError, ValueError):  # nobody reads any more: the file goes on
                pass
        if self._shown > self._most:
            self._shorten()

    def _shorten(self) -> None:
        """Cut the log to its first quarter and its newest half. Bytes that are appended between the last read
        and the cut are lost."""
        first = os.pread(self._file, self._most // 4, 0).rpartition(b"\n")[0] + b"\n"
        last = os.pread(self._file, self._shown, self._shown - self._most // 2).partition(b"\n")[2]
        left_out = self._shown - len(first) - len(last)
        os.ftruncate(self._file, len(first))
        os.write(self._file, f"… {left_out:,} bytes left out …\n".encode() + last)
        self._shown = os.fstat(self._file).st_size
