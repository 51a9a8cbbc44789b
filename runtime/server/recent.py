"""The most recent requests, grouped by program, for the dashboard. Their number is bounded."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ramify.messages import Generate, TextChunk, Usage
from ramify.runtime.server.metrics import ChoiceUsages
from ramify.runtime.server.throughput import Throughput

PROGRAMS = 48
"""Number of most recent programs that are kept."""
REQUESTS = 160
"""Number of requests kept of each program. Older ones count only in the sums."""
TEXT = 160
"""Characters kept of a prompt, of an output and of an error."""
NAME = 80
"""Characters kept of a name or an id."""
DEPTH = 32
"""Number of names kept of a request's path."""
CLIENT = 40
"""Characters kept of a client's name."""

SUMMED = ("prompt_tokens", "cached_tokens", "completion_tokens", "forced_tokens", "evicted_tokens")


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The record of one generation, updated while it runs. Times are in seconds, by `clock`."""

    program: ProgramRecord
    throughput: Throughput
    clock: Callable[[], float]
    texts: bool
    """Whether the beginning of the output and the error's message are kept."""
    rid: str
    path: tuple[str, ...]
    forks: tuple[str, ...]
    """Ids of the forks in `path`."""
    begun: float
    client: str
    key: str
    """Name of the API key; "" without keys."""
    choices: ChoiceUsages
    """The choices of the prompt, this generation among them."""
    prompt: str = ""
    """The last characters of the prompt."""
    text: str = ""
    """The first characters of the output."""
    first: float | None = None
    ended: float | None = None
    usage: Usage = field(default_factory=Usage)
    output_tokens: int = 0
    forced_tokens: int = 0
    outcome: str = ""
    """The finish reason, or "error"; "" while the generation runs."""
    error: str = ""
    """The beginning of the error's message; without `texts`, the error's class."""

    def add_chunk(self, chunk: TextChunk) -> None:
        if self.first is None and chunk.ids:
            held = 0.0 if chunk.usage is None else chunk.usage.decode_s
            self.first = max(self.begun, self.clock() - held)
        self.output_tokens += len(chunk.ids)
        self.forced_tokens += len(chunk.forced)
        before = self.usage
        prompt = cached = 0
        if chunk.usage is not None:
            self.usage = chunk.usage
            if self.choices.counts_prompt(self):
                prompt = max(0, self.usage.prompt_tokens - before.prompt_tokens)
                cached = max(0, self.usage.cached_tokens - before.cached_tokens)
        self.throughput.add_tokens(prompt, cached, len(chunk.ids))
        if self.texts and len(self.text) < TEXT:
            self.text = (self.text + chunk.text)[:TEXT]

    def end_request(self, outcome: str, error: Exception | None = None) -> Usage:
        """End the record. Returns the usage. If the last chunk did not come, the usage is that of the first
        chunk with the output tokens that have come."""
        program = self.program
        self.usage = self.usage_so_far()
        self.ended = program.touched = self.clock()
        self.outcome = outcome
        program.running.discard(self)
        if outcome == "error":
            program.failed += 1
            program.failed_at = self.ended
        if error is not None:
            self.error = str(error)[:TEXT] if self.texts else type(error).__name__
        for name in SUMMED:
            program.sums[name] += getattr(self.usage, name)
        return self.usage

    def usage_so_far(self) -> Usage:
        """The usage that was reported last. Output tokens that have come since are added to it."""
        usage = self.usage
        if usage.completion_tokens >= self.output_tokens:
            return usage
        forced = max(usage.forced_tokens, self.forced_tokens)
        return msgspec.structs.replace(usage, completion_tokens=self.output_tokens, forced_tokens=forced)

    def progress(self, now: float) -> dict[str, Any]:
        """The record of a running request in plain types, without texts."""
        usage = self.usage_so_far()
        return {
            "rid": self.rid,
            "program": self.program.name,
            "program_id": self.program.id,
            "client": self.client,
            "key": self.key,
            "age_s": now - self.begun,
            "first_s": None if self.first is None else now - self.first,
            "prompt_tokens": usage.prompt_tokens,
            "cached": usage.cached_tokens,
            "out": usage.completion_tokens,
        }

    def to_dict(self, origin: float) -> dict[str, Any]:
        """The record in plain types, with times in seconds since `origin`."""
        usage = self.usage_so_far()
        return {
            "rid": self.rid,
            "path": list(self.path),
            "forks": list(self.forks),
            "start": self.begun - origin,
            "first": None if self.first is None else self.first - origin,
            "end": None if self.ended is None else self.ended - origin,
            "phases": None if self.ended is None else usage.phases,
            "prompt_tokens": usage.prompt_tokens,
            "cached": usage.cached_tokens,
            "out": usage.completion_tokens,
            "forced": usage.forced_tokens,
            "evicted": usage.evicted_tokens,
            "evicted_by": usage.evicted_by,
            "retractions": usage.retractions,
            "outcome": self.outcome,
            "error": self.error,
            "client": self.client,
            "prompt": self.prompt,
            "text": self.text,
        }


@dataclass(slots=True, eq=False)
class ProgramRecord:
    """The requests of one program, or the requests at one endpoint that belong to no program."""

    id: str
    name: str
    begun: float
    touched: float
    requests: collections.deque[RequestRecord] = field(
        default_factory=lambda: collections.deque(maxlen=REQUESTS)
    )
    count: int = 0
    running: set[RequestRecord] = field(default_factory=set)
    failed: int = 0
    failed_at: float | None = None
    """The time of the latest failure."""
    ended: bool = False
    """True once the client has ended the program."""
    sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SUMMED, 0))
    """Sums over all requests of the program that have ended."""

    def summary(self, now: float) -> dict[str, Any]:
        """The program in plain types, with the client and the prompt of its latest request. The sums include
        running requests."""
        usages = [request.usage_so_far() for request in self.running]
        sums = {name: self.sums[name] + sum(getattr(usage, name) for usage in usages) for name in SUMMED}
        latest = self.requests[-1]
        return {
            "id": self.id,
            "name": self.name,
            "age_s": now - self.begun,
            "idle_s": 0.0 if self.running else now - self.touched,
            "took_s": (now if self.running else self.touched) - self.begun,
            "requests": self.count,
            "running": len(self.running),
            "failed": self.failed,
            "failed_s": None if self.failed_at is None else now - self.failed_at,
            "ended": self.ended,
            "client": latest.client,
            "prompt": latest.prompt,
            **sums,
        }

    def details(self, now: float) -> dict[str, Any]:
        """The summary, and the requests that are kept. Times are in seconds since the start of the
        program."""
        return {
            **self.summary(now),
            "now": now - self.begun,
            "calls": [request.to_dict(self.begun) for request in self.requests],
        }


class Recent:
    """The most recent requests; with `texts`, also the ends of prompts and the beginnings of outputs."""

    def __init__(self, *, texts: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.throughput = Throughput(clock)
        self._texts = texts
        self._clock = clock
        self._programs: collections.OrderedDict[str, ProgramRecord] = collections.OrderedDict()

    def record_request(
        self, request: Generate, endpoint: str, client: str = "", choices: ChoiceUsages | None = None
    ) -> RequestRecord:
        """Begin the record of a generation that `client` asked for, one of `choices` of its prompt."""
        now, hint = self._clock(), request.hint
        name = endpoint if hint is None else hint.name or "program"
        key = endpoint if hint is None else hint.program[:NAME]
        program = self._programs.get(key)
        if program is None:
            self._make_room()
            program = self._programs[key] = ProgramRecord(key, name[:NAME], now, now)
        self._programs.move_to_end(key)
        path = (request.rid,) if hint is None or not hint.path else hint.path
        forks = () if hint is None else hint.forks
        record = RequestRecord(
            program=program,
            throughput=self.throughput,
            clock=self._clock,
            texts=self._texts,
            rid=request.rid,
            path=_cut(path),
            forks=_cut(forks),
            begun=now,
            client=client[:CLIENT],
            key=request.key,
            choices=choices or ChoiceUsages(1),
        )
        if self._texts:
            record.prompt = _end_of(request)
        program.requests.append(record)
        program.count += 1
        program.running.add(record)
        program.ended = False
        return record

    def end_program(self, program: str) -> None:
        """Mark `program` as ended."""
        record = self.get(program)
        if record is not None:
            record.ended = True

    def __iter__(self) -> Iterator[ProgramRecord]:
        """Iterate over the programs, the most recently active one first."""
        return reversed(self._programs.values())

    def get(self, program: str) -> ProgramRecord | None:
        return self._programs.get(program[:NAME])

    def now(self) -> float:
        return self._clock()

    def running(self, most: int) -> list[dict[str, Any]]:
        """The oldest `most` running requests in plain types; ``first_s`` is the seconds since the first
        token, None before it."""
        now = self._clock()
        records = sorted(
            (record for program in self for record in program.running), key=lambda record: record.begun
        )
        return [record.progress(now) for record in records[:most]]

    def _make_room(self) -> None:
        """Drop one program if there are `PROGRAMS` already: the oldest idle one, or the oldest of all."""
        if len(self._programs) >= PROGRAMS:
            idle = (key for key, program in self._programs.items() if not program.running)
            del self._programs[next(idle, next(iter(self._programs)))]


def _cut(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name[:NAME] for name in names[:DEPTH])


def _end_of(request: Generate) -> str:
    """The last characters of the last text in the prompt; "" if there are only token ids."""
    if request.chat:
        return request.chat[-1].content[-TEXT:]
    for segment in reversed(request.prompt):
        if isinstance(segment, str):
            return segment[-TEXT:]
    return ""
