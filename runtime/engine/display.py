"""The display of an `Engine`: one line, and HTML for notebooks. Neither starts anything."""

from __future__ import annotations

import concurrent.futures
import platform
import re
import threading
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from ramify.errors import EngineError
from ramify.html.fragment import escaped, fragment, head, table, tag
from ramify.loop import background_loop, submit
from ramify.messages import SchedulerStats
from ramify.model_info import ModelInfo

if TYPE_CHECKING:
    from ramify.runtime.engine.engine import Engine

STATS_S = 0.25
"""Longest time in seconds that the HTML waits for the counters of the scheduler."""


def engine_line(engine: Engine) -> str:
    info = _known_info(engine)
    name = engine._name or (engine.config.model if info is None else info.name)
    facts = "" if info is None else f": {info.device} {info.dtype}, context {info.context_length:,}"
    if info is not None and info.kv_room is not None:
        facts += f", KV of {info.kv_room.tokens:,} tokens"
    others = "".join(f", {other} {state}" for other, state in _others(engine).items())
    return f"<Engine {name} {engine._state}{facts}{others}>"


def _others(engine: Engine) -> dict[str, str]:
    """Name → state of the further models, for the engine of several that is its first one."""
    pool = engine._pool
    if pool is None or engine._name != pool.first:
        return {}
    return {name: pool.state(name) for name in pool.names[1:]}


def _known_info(engine: Engine) -> ModelInfo | None:
    return None if engine._frontend is None else engine._frontend.known_info


def engine_html(engine: Engine) -> str:
    """The state, the model, the KV tokens, the requests, the memory and the versions. The counters of the
    scheduler are left out if they do not come within `STATS_S`, as while it computes a long step."""
    info = _known_info(engine)
    rows: list[tuple[str, str]] = []
    if info is None:
        rows.append(("model", engine.config.model))
    else:
        rows += [
            ("model", f"{info.name} ({info.path})"),
            ("device", f"{info.device}, {info.dtype}"),
            ("context", f"{info.context_length:,} tokens"),
        ]
        rows += [] if info.kv_room is None else [("room", info.kv_room.text)]
    rows += [(f"model {other}", state) for other, state in _others(engine).items()]
    rows += _running(engine) if engine._state == "ready" else []
    rows.append(("versions", _versions()))
    cells = [(tag("span", escaped(name), "soft"), escaped(value)) for name, value in rows]
    return fragment([head("Engine", engine._state), table(cells)])


def _running(engine: Engine) -> Iterator[tuple[str, str]]:
    stats = _stats(engine)
    if stats is not None:
        size = stats.page_size
        cached = (stats.pages_evictable + stats.pages_leased) * size
        used, total = stats.pages_in_use * size, stats.pages_total * size
        yield "KV tokens", f"{used:,} in use + {cached:,} cached of {total:,}"
        yield "requests", f"{stats.running} running, {stats.waiting} waiting"
    elif engine._frontend is not None:
        yield "requests", f"{engine._frontend.in_flight} in flight"
    pids = engine.pids
    memory = _memory(pids.values())
    if memory is not None:
        yield "memory", f"{memory / 2**30:.2f} GiB in {len(pids)} processes"


def _stats(engine: Engine) -> SchedulerStats | None:
    if threading.current_thread().name == "ramify-loop" or not background_loop().is_running():
        return None
    if engine._frontend is None:
        return None
    future = submit(engine._frontend.control.stats())
    try:
        return future.result(STATS_S)
    except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError, EngineError):
        future.cancel()
        return None


def _memory(pids: Iterable[int]) -> int | None:
    """Bytes of the host's memory that the processes hold: what they share, such as mapped weights, counts
    once. None where Linux's ``smaps_rollup`` cannot be read."""
    total = 0
    for pid in pids:
        try:
            found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
        except OSError:
            return None
        total += int(found[1]) * 1024 if found else 0
    return total


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for package, name in (("ramify-llm", "Ramify"), ("torch", "torch")):
        try:
            found.append(f"{name} {version(package)}")
        except PackageNotFoundError:  # run from a source folder that was not installed
            continue
    return ", ".join(found)
