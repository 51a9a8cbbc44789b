"""`ramify top`: a running server in the terminal, live.

The figures are those of the dashboard (/live), of GET /cache, /v1/models and /metrics. A path that the key
may not read leaves its part of the frame empty.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from ramify.cli.target import add_key_flag
from ramify.errors import InvalidRequest, RamifyError, Unauthorized
from ramify.text import plain

DEFAULT_URL = "http://127.0.0.1:30000"
TIMEOUT_S = 5.0
"""Longest time without data from the server, after which a frame says that it is not reachable."""
WINDOW_S = 30.0
"""Seconds over which a frame's rates and latencies are taken, once the command has run this long."""
SORTS = ("age", "out", "rate", "program", "client")
LOOK_S = 0.2
"""Seconds after which a terminal of another size is noticed."""
HOLDS = 8
"""Rows of the list of holds, so that requests have the rest of the screen."""
BAR = (("in_use", "#"), ("pinned", "="), ("leased", "-"), ("evictable", ":"), ("free", "."))
"""Pages by state, with the character of the bar."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--endpoint",
        "--url",
        metavar="URL",
        default=DEFAULT_URL,
        help=f"The server. Default: {DEFAULT_URL}.",
    )
    add_key_flag(parser)
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="Seconds between frames. Default: 1."
    )
    parser.add_argument("--sort", choices=SORTS, default="age", help="Order of the requests. Default: age.")
    parser.add_argument(
        "--once", action="store_true", help="Print one frame as plain text, and exit; 1 if not reachable."
    )
    parser.epilog = (
        "Keys: q quits, s sorts requests by the next column, p pauses, any other key fetches at once. "
        "Without a terminal that can move its cursor, frames are printed one below the other."
    )


@dataclass(frozen=True)
class Sample:
    """The server's figures at `at`, seconds of the monotonic clock."""

    at: float
    live: Mapping[str, Any] | None = None
    cache: Sequence[Mapping[str, Any]] = ()
    models: Sequence[Mapping[str, Any]] = ()
    metrics: Mapping[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)
    """(name, values of the labels) → value, for the metrics that a frame shows."""
    error: str = ""
    """Reason why there are no figures; empty if there are."""


async def fetch(client: Any) -> Sample:
    """The figures of the server of `client`, an `HttpClient`, now. Never raises a `RamifyError`."""
    jobs = (client.get("/live"), client.get("/cache"), client.get("/v1/models"), client.text("/metrics"))
    found: list[Any] = list(await asyncio.gather(*jobs, return_exceptions=True))
    for one in found:
        if isinstance(one, BaseException) and not isinstance(one, RamifyError):
            raise one
    now = time.monotonic()
    live, cache, models, metrics = (None if isinstance(one, RamifyError) else one for one in found)
    if live is None:
        why = "refused" if isinstance(found[0], Unauthorized) else "not reachable"
        return Sample(now, error=f"{why}: {found[0]}")
    return Sample(
        now,
        live,
        cache["models"] if cache else (),
        models["data"] if models else (),
        read_metrics(metrics) if metrics else {},
    )


def read_metrics(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """The histograms of latencies, summed over endpoints, and the counters by API key."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[tuple[str, tuple[str, ...]], float] = {}
    for family in text_string_to_metric_families(text):
        if family.name.endswith(("first_token_seconds", "token_latency_seconds")) or "_key_" in family.name:
            for sample in family.samples:
                labels = {name: value for name, value in sample.labels.items() if name != "endpoint"}
                place = sample.name, tuple(labels.values())
                found[place] = found.get(place, 0.0) + sample.value
    return found


# --- a frame --------------------------------------------------------------------------------------


def frame(
    now: Sample, before: Sample | None, *, url: str, width: int, height: int | None, sort: str, paused: bool
) -> list[str]:
    """The lines of a frame, at most `width` characters each and at most `height` (None: any number).

    before : an earlier sample, from which rates and latencies are taken; None for those since the start
    """
    if now.live is None:
        return _cut([f"ramify top  {url}", "", now.error], width, height)
    earlier = before if before is not None and before.live is not None else None
    holds = _holds(now)
    below = [*_models(now), *_keys(now)]
    head = _head(now, earlier, url, width, paused)
    requests = _requests(now.live["running"], sort)
    if height is not None:
        room = max(3, height - len(head) - len(holds) - len(below) - 1)
        if len(requests) > room:
            more = len(requests) - room + 1
            requests = [*requests[: room - 1], f"and {more} more"]
    return _cut([*head, "", *requests, *holds, *below], width, height)


def _cut(lines: Sequence[str], width: int, height: int | None) -> list[str]:
    return [line[:width].rstrip() for line in lines[:height]]


def _head(now: Sample, before: Sample | None, url: str, width: int, paused: bool) -> list[str]:
    live = now.live
    assert live is not None
    stats = live["stats"]
    state = "healthy" if live["healthy"] else "NOT HEALTHY"
    lines = [
        f"ramify top  {'PAUSED  ' if paused else ''}{url}  {live['model']}  up {_span(live['up_s'])}  {state}"
    ]
    if stats is None:
        return [*lines, "the scheduler does not answer"]
    queue = f"{stats['running']} running  {stats['waiting']} waiting  {stats['compiling']} wait for a grammar"
    lines.append(f"requests  {queue}  {live['in_flight']} in flight")
    out, prompt, cached, over = _rates(live["throughput"])
    lines.append(
        f"tokens    {out:.1f} written/s  {prompt:.1f} of prompts/s, {cached:.0%} of them cached  ({over})"
    )
    first = _latency(now, before, "ramify_time_to_first_token_seconds")
    each = _latency(now, before, "ramify_inter_token_latency_seconds")
    lines.append(f"latency   first token {first}  between tokens {each}")
    for one in now.cache or [{f"pages_{name}": stats.get(f"pages_{name}", 0) for name in PAGES} | stats]:
        name = f"{one['model']}: " if len(now.cache) > 1 else ""
        told, bar = _pages(one, max(10, min(90, width - 12)))
        lines += [f"pages     {name}{told}", f"          {bar}"]
    read, written = (stats.get(f"cold_{name}", 0) / 1e6 for name in ("bytes", "written_bytes"))
    if read or written:
        lines.append(f"cold      {stats['cold_tokens']} tokens, {read:.0f} MB read, {written:.0f} MB written")
    return lines


PAGES = ("total", "free", "evictable", "leased", "in_use", "pinned")


def _pages(one: Mapping[str, Any], width: int) -> tuple[str, str]:
    """The numbers of pages by state, and a bar of them. Pages that are pinned and in use count as in use."""
    total = one["pages_total"]
    pinned = min(one["pages_pinned"], one["pages_leased"])
    counts = {name: one[f"pages_{name}"] for name in ("in_use", "leased", "evictable", "free")}
    counts |= {"pinned": pinned, "leased": counts["leased"] - pinned}
    bar, place, shown = "", 0, 0
    for name, character in BAR:
        place += counts[name]
        until = round(width * place / total) if total else 0
        bar += character * (until - shown)
        shown = until
    told = ", ".join(f"{counts[name]} {name.replace('_', ' ')} {character}" for name, character in BAR)
    return f"{total} x {one['page_size']} tokens: {told}", f"[{bar}]"


def _rates(throughput: Mapping[str, Any]) -> tuple[float, float, float, str]:
    """(tokens written per second, prompt tokens per second, cached share, the time that they are of)."""
    length = throughput["interval_s"]
    count = max(1, min(len(throughput["output_tokens"]), round(WINDOW_S / length)))
    names = ("output_tokens", "prompt_tokens", "cached_tokens")
    out, prompt, cached = (sum(throughput[name][-count:]) for name in names)
    seconds = count * length
    return out / seconds, prompt / seconds, cached / prompt if prompt else 0.0, f"last {seconds:g} s"


def _latency(now: Sample, before: Sample | None, name: str) -> str:
    """Mean and 95th percentile of a histogram, of the time since `before`."""

    def count(suffix: str, *labels: str) -> float:
        place = name + suffix, labels
        return now.metrics.get(place, 0.0) - (0.0 if before is None else before.metrics.get(place, 0.0))

    number = count("_count")
    if number <= 0:
        return "-"
    below = {float(labels[0]): labels[0] for one, labels in now.metrics if one == name + "_bucket"}
    bounds = sorted(below)  # the last one is infinite
    tail = next((bound for bound in bounds if count("_bucket", below[bound]) >= 0.95 * number), math.inf)
    told = f"<= {_short(tail)}" if tail < math.inf else f"> {_short(bounds[-2])}"
    return f"{_short(count('_sum') / number)}, p95 {told}"


def _requests(running: Sequence[Mapping[str, Any]], sort: str) -> list[str]:
    rows = []
    for one in running:
        rate = one["out"] / one["first_s"] if one["first_s"] else 0.0
        rows.append({**one, "age": -one["age_s"], "rate": rate})
    largest_first = sort in ("out", "rate")
    rows.sort(key=lambda row: row[sort], reverse=largest_first)
    marks = {"age": "AGE", "out": "OUT", "rate": "TOK/S", "program": "PROGRAM", "client": "CLIENT"}
    titles = ("AGE", "PROMPT", "CACHED", "OUT", "TOK/S", "STATE", "PROGRAM", "CLIENT", "KEY", "REQUEST")
    return _table(
        [f"{title}*" if title == marks[sort] else title for title in titles],
        (11, 7, 7, 7, 7, -7, -20, -18, _key_width(rows), -64),
        [
            (
                _short(row["age_s"]),
                str(row["prompt_tokens"] or "-"),
                str(row["cached"] if row["prompt_tokens"] else "-"),
                str(row["out"]),
                f"{row['rate']:.1f}" if row["rate"] else "-",
                "waiting" if row["first_s"] is None else "output",
                row["program"],
                row["client"],
                row.get("key", ""),
                row["rid"],
            )
            for row in rows
        ],
    )


def _holds(now: Sample) -> list[str]:
    held = [hold for one in now.cache for hold in one["holds"]]
    if not held:
        return []
    titles = ("LEFT", "NEEDED", "TOKENS", "PAGES", "KIND", "NAME", "CLIENT", "KEY", "HOLD")
    rows = [
        (
            "-" if hold["seconds_left"] is None else _span(hold["seconds_left"]),
            "-" if hold["needed_in"] is None else _short(hold["needed_in"]),
            str(hold["tokens"]),
            str(hold["pages"]),
            hold["kind"],
            hold["name"],
            hold["client"],
            hold.get("key", ""),
            hold["owner"],
        )
        for hold in held[:HOLDS]
    ]
    more = len(held) - len(rows) + sum(one["more_holds"] for one in now.cache)
    return [
        "",
        *_table(titles, (11, 11, 8, 7, -10, -20, -18, _key_width(held), -80), rows),
        *([f"and {more} more"] if more else []),
    ]


def _models(now: Sample) -> list[str]:
    """Models with their states, on a server of several."""
    if not any("state" in one for one in now.models):
        return []
    rows = []
    for one in now.models:
        size, context = one.get("size") or one.get("size_bytes"), one.get("max_model_len")
        shown = f"{size / 1e9:.2f} GB" if isinstance(size, int | float) else "-"
        rows.append((one["id"], str(one.get("state", "-")), shown, str(context or "-")))
    return ["", *_table(("MODEL", "STATE", "SIZE", "CONTEXT"), (-40, -12, 10, 10), rows)]


def _keys(now: Sample) -> list[str]:
    """Requests, refusals and tokens by API key, on a server with several keys."""
    keys: dict[str, dict[str, float]] = {}
    for (name, labels), value in now.metrics.items():
        if name.startswith("ramify_key_") and name.endswith("_total") and labels:
            column = name.removeprefix("ramify_key_").removesuffix("_total")
            if column == "tokens":
                column = labels[1]
            sums = keys.setdefault(labels[0], {})
            sums[column] = sums.get(column, 0.0) + value
    if not keys:
        return []
    columns = ("requests", "refusals", "prompt", "cached", "generation")
    rows = [(key, *(f"{sums.get(name, 0):.0f}" for name in columns)) for key, sums in sorted(keys.items())]
    titles = ("KEY", "REQUESTS", "REFUSED", "PROMPT", "CACHED", "WRITTEN")
    return ["", *_table(titles, (-26, 10, 10, 12, 12, 12), rows)]


def _key_width(rows: Sequence[Mapping[str, Any]]) -> int:
    """Width of the column of keys: 0, for none, on a server without several keys."""
    return -16 if any(row.get("key") for row in rows) else 0


def _table(titles: Sequence[str], widths: Sequence[int], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table. A negative width aligns a column to the left; longer cells are cut, and a column of
    width 0 is left out."""
    return [
        " ".join(
            plain(cell)[:-width].ljust(-width) if width < 0 else cell[:width].rjust(width)
            for cell, width in zip(row, widths, strict=True)
            if width
        )
        for row in (titles, *rows)
    ]


def _short(seconds: float) -> str:
    return (
        f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s" if seconds < 100 else _span(seconds)
    )


def _span(seconds: float) -> str:
    """Seconds in the largest two units."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


# --- the terminal -----------------------------------------------------------------------------------


class Terminal:
    """A screen of its own for frames, and the keys that are pressed. As a ``with`` block, the terminal is as
    before at the end of the block."""

    def __init__(self) -> None:
        self.resized = False

    @contextlib.contextmanager
    def opened(self) -> Iterator[Terminal]:
        import termios
        import tty

        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
        handler = signal.signal(signal.SIGWINCH, self._note_size)
        try:
            tty.setcbreak(keyboard)
            self._write("\x1b[?1049h\x1b[?25l")
            yield self
        finally:
            self._write("\x1b[?25h\x1b[?1049l")
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
            signal.signal(signal.SIGWINCH, handler)

    def draw(self, lines: Sequence[str]) -> None:
        """Show a frame. Each line is overwritten in place and the rest cleared, in one write: no flicker."""
        titles = ("     AGE", "    AGE*", "    LEFT", "MODEL ", "KEY ", "ramify top")
        styled = [f"\x1b[7m{line}\x1b[27m" if line.startswith(titles) else line for line in lines]
        self._write("\x1b[H" + "\r\n".join(f"{line}\x1b[K" for line in styled) + "\x1b[J")

    def key(self, seconds: float) -> str:
        """The next key, waited for at most `seconds`; "" if there is none, or if the size has changed."""
        until = time.monotonic() + seconds
        while not self.resized and (left := until - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], min(left, LOOK_S))[0]:
                return os.read(sys.stdin.fileno(), 1).decode(errors="replace") or "q"
        return ""

    def _note_size(self, number: int, where: FrameType | None) -> None:
        self.resized = True

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def run_command(options: argparse.Namespace) -> int:
    from ramify.credentials import endpoint_key, without_credentials
    from ramify.lang.backends.http import HttpClient
    from ramify.loop import wait

    if not 0.1 <= options.interval < math.inf:
        raise InvalidRequest(
            f"--interval is {options.interval:g}; it must be at least 0.1.", field="--interval"
        )
    client = HttpClient(options.endpoint, endpoint_key(options.endpoint_key), timeout_s=TIMEOUT_S)
    shown = {"url": without_credentials(options.endpoint)}
    try:
        if options.once:
            return _once(wait(fetch(client)), options.sort, shown)
        capable = sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        if not capable:
            return _frames(client, options, shown)
        with Terminal().opened() as terminal:
            return _watch(terminal, client, options, shown)
    finally:
        wait(client.aclose())


def _once(found: Sample, sort: str, shown: Mapping[str, Any]) -> int:
    lines = frame(found, None, width=200, height=None, sort=sort, paused=False, **shown)
    print("\n".join(lines), flush=True)
    return 1 if found.live is None else 0


def _frames(client: Any, options: argparse.Namespace, shown: Mapping[str, Any]) -> int:
    """Print frames one below the other until the command is interrupted."""
    from ramify.loop import wait

    while True:
        if _once(wait(fetch(client)), options.sort, shown):
            print("trying again")
        print(flush=True)
        time.sleep(options.interval)


def _watch(terminal: Terminal, client: Any, options: argparse.Namespace, shown: Mapping[str, Any]) -> int:
    from ramify.loop import wait

    samples: list[Sample] = []
    sort, paused, due = options.sort, False, 0.0
    while True:
        if not samples or (not paused and time.monotonic() >= due):
            samples.append(wait(fetch(client)))
            due = samples[-1].at + options.interval
            while len(samples) > 2 and samples[1].at <= samples[-1].at - WINDOW_S:
                del samples[0]
        terminal.resized = False
        width, height = shutil.get_terminal_size()
        now = samples[-1]
        # A server that was restarted counts from 0 again.
        before = next((one for one in samples[:-1] if _same_server(one, now)), None)
        terminal.draw(frame(now, before, width=width, height=height, sort=sort, paused=paused, **shown))
        key = terminal.key(3600.0 if paused else due - time.monotonic())
        if key in ("q", "Q", "\x03", "\x04"):
            return 0
        if key == "s":
            sort = SORTS[(SORTS.index(sort) + 1) % len(SORTS)]
        elif key == "p":
            paused = not paused
        elif key:
            due = 0.0


def _same_server(one: Sample, now: Sample) -> bool:
    """Whether no restart lies between the two samples."""
    if one.live is None or now.live is None:
        return False
    up_s: float = now.live["up_s"] - one.live["up_s"]
    return abs(up_s - (now.at - one.at)) < 5.0
