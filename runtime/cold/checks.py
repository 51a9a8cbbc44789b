"""Options of the cold tier that are refused at the start: no later event makes them work."""

from __future__ import annotations

import errno
from pathlib import Path

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.runtime.config import EngineConfig

PASSING = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of a disk that may pass: the engine serves without the folder, and the log says so."""


def host_kv_on_cpu(config: EngineConfig) -> UnsupportedField:
    """The error for `host_kv_gb` on a device whose memory is the host's."""
    return UnsupportedField(
        f"host_kv_gb is {config.host_kv_gb:g} on the CPU, whose KV pages are in the host's memory.",
        field="host_kv_gb",
        remedy="Give more kv_memory_gb instead.",
    )


def check_folder(config: EngineConfig) -> None:
    """Make the folder `cold_dir`. Raises `InvalidRequest` for a path that is no folder or cannot be made."""
    if config.cold_dir is None:
        return
    try:
        Path(config.cold_dir).expanduser().mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        if error.errno not in PASSING:
            raise InvalidRequest(
                f"cold_dir is {config.cold_dir!r}, which is no folder and cannot be made one:"
                f" {error.strerror}.",
                field="cold_dir",
                remedy="Name a folder that this user may write to.",
            ) from None
