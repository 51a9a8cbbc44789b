"""The destination of a batch's results: a file that the next run continues, or a write-only stream.

labels.jsonl                     a file
-, /dev/stdout, /dev/fd/63       a descriptor of this process: standard output, or `>(gzip > labels.gz)`
a pipe, a device                 opened for writing
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
from pathlib import Path
from typing import Any

from ramify.errors import InvalidRequest, RamifyError

logger = logging.getLogger("ramify")

Place = str | os.PathLike[str]

STANDARD_OUTPUT = 1
_NAMED = {"-": STANDARD_OUTPUT, "/dev/stdout": STANDARD_OUTPUT, "/dev/stderr": 2}
_NUMBERED = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")


def descriptor(path: Place) -> int | None:
    """The file descriptor of this process that `path` names; None if `path` names none. "-" and /dev/fd/63
    name descriptors."""
    text = os.fspath(path)
    numbered = _NUMBERED.fullmatch(text)
    return int(numbered[1]) if numbered else _NAMED.get(text)


def is_stream(path: Place) -> bool:
    """Whether `path` is a stream. A stream is write-only, so no later run can continue it."""
    if descriptor(path) is not None:
        return True
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def open_stream(path: Place) -> Any:
    """The stream at `path`, opened for unbuffered writing. Opening a pipe waits for a reader, and logs that
    it waits."""
    number = descriptor(path)
    if number is not None:
        return open(os.dup(number), "wb", buffering=0)
    if stat.S_ISFIFO(os.stat(path).st_mode):
        try:
            number = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            logger.warning("%s is a pipe that nobody reads yet; waiting for its reader.", path)
        else:
            os.set_blocking(number, True)
            return open(number, "wb", buffering=0)
    return open(path, "wb", buffering=0)


def check_file(path: Place, field: str) -> None:
    """Raise `InvalidRequest` if `path` can be neither created nor written, or names a closed descriptor."""
    place = Path(path)
    number = descriptor(path)
    if number is not None:
        try:
            os.fstat(number)
        except OSError:
            raise InvalidRequest(
                f"{path} is not open: this process has no descriptor {number}.",
                field=field,
                remedy="Name a file, or a descriptor that the shell opens, such as >(gzip > out.gz).",
            ) from None
        return
    if place.is_dir():
        raise InvalidRequest(f"{path} is a folder.", field=field, remedy="Name a file in it.")
    if not place.parent.is_dir():
        raise InvalidRequest(
            f"There is no folder {place.parent} for {place.name}.",
            field=field,
            remedy=f"Make it: mkdir -p {place.parent}",
        )
    if not os.access(place if place.exists() else place.parent, os.W_OK):
        raise InvalidRequest(
            f"{path} cannot be written: it, or its folder, does not allow it.",
            field=field,
            remedy="Name another file.",
        )


def check_out(path: Place) -> None:
    """Raise `InvalidRequest` if `check_file` refuses `path`, or if `path` has an unsuitable suffix."""
    check_file(path, "out")
    suffix = Path(path).suffix
    if suffix == ".parquet" and is_stream(path):
        raise InvalidRequest(
            f"{path} is a pipe or a device, and a table needs a file.",
            field="out",
            remedy="Name a file, or no .parquet.",
        )
    if suffix not in ("", ".jsonl", ".parquet") and not is_stream(path):
        raise InvalidRequest(
            f"{path}: results are not written as {suffix}.",
            field="out",
            remedy="Name a .jsonl or .parquet file.",
        )


def unwritten(path: Place, error: OSError, remedy: str) -> RamifyError:
    """Error for a file that could not be written because of `error`."""
    return RamifyError(
        f"{path} cannot be written: {error.strerror or error}.",
        field="out",
        remedy=f"Make room there (df -h, ulimit -f). {remedy}" if error.errno in FULL else remedy,
    )


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, a full quota, and the limit on the size of files."""
