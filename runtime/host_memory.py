"""The memory of this host and of its container, as Linux reports it. Elsewhere only the total is known."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
WEIGHTS_FILE = 1 << 20
"""Size in bytes from which a mapped file counts as weights; libraries are left out by name."""


class HostMemory(NamedTuple):
    """Bytes.

    total : the host's memory, or the lowest limit of the cgroups that this process is in
    free : memory that processes can touch without swapping, or a kill by the kernel, and without losing
        files that a process maps; `total` if the system does not report it
    available : `free`, and the files that processes map
    """

    total: int
    free: int
    available: int


def host_memory(mapped: int = 0) -> HostMemory:
    """The host's memory now, or its container's where that is less. Takes about 0.3 ms.

    The page cache of files counts as free, except the pages that processes map: weights are mapped files, and
    each step reads all of them. At least `mapped` bytes of the page cache count as mapped.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    known = {name: 1024 * size for name, size in _numbers(PROC / "meminfo").items()}
    free = available = total
    if "MemAvailable" in known:
        available = known["MemAvailable"]
        free = available - max(known.get("Mapped", 0), mapped)
    for limit, used, cached, in_use in _cgroups():
        total = min(total, limit)
        available = min(available, limit - used + cached)
        free = min(free, limit - used + cached - max(in_use, mapped))
    return HostMemory(total, max(0, min(free, total)), max(0, min(available, total)))


def _cgroups() -> Iterator[tuple[int, int, int, int]]:
    """(limit, used, page cache, mapped page cache) in bytes of each memory cgroup with a limit above this
    process, in version 2 and version 1."""
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        unified = number == "0" and not controllers
        if unified:
            root, names, prefix = CGROUPS, ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            root, names, prefix = CGROUPS / "memory", ("limit_in_bytes", "usage_in_bytes"), "total_"
            names = (f"memory.{names[0]}", f"memory.{names[1]}")
        else:
            continue
        own = root / path.lstrip("/")
        # In a container the path may be that of the host: then only the root of the mount is there.
        for folder in (own, *own.parents):
            try:
                limit, used = ((folder / name).read_text().strip() for name in names)
                found = _numbers(folder / "memory.stat")
            except OSError:
                limit = "max"
            if limit.isdigit():
                cached = found.get(f"{prefix}active_file", 0) + found.get(f"{prefix}inactive_file", 0)
                mapped = found.get(f"{prefix}{'file_mapped' if unified else 'mapped_file'}", 0)
                yield int(limit), int(used), cached, mapped
            if folder == root:
                break


def mapped_weights() -> int:
    """Bytes of the files from `WEIGHTS_FILE` on that this process maps, read or not, without libraries."""
    total = 0
    try:
        maps = (PROC / "self/maps").read_text()
    except OSError:
        return 0
    for line in maps.splitlines():
        addresses, _, _, _, inode, *path = line.split(None, 5)
        if inode != "0" and path and ".so" not in path[0]:
            first, last = (int(address, 16) for address in addresses.split("-"))
            total += last - first if last - first >= WEIGHTS_FILE else 0
    return total


def _numbers(path: Path) -> dict[str, int]:
    """The lines "name number" or "name: number kB" of a file of the kernel; empty if it is not there."""
    try:
        return {name: int(number) for name, number in re.findall(r"^(\w+):?\s+(\d+)", path.read_text(), re.M)}
    except OSError:
        return {}
