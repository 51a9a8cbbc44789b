"""The client of a load test.

It notes the time of each chunk; chunks are parsed only after the measurement.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ramify.credentials import without_credentials
from ramify.errors import RamifyError
from ramify.lang.backends.http import HttpClient


@dataclass(frozen=True)
class Endpoint:
    """An endpoint under test."""

    name: str
    url: str
    """The address, which ends in /v1."""
    model: str
    api_key: str | None = None

    @property
    def address(self) -> str:
        """`url` as a report may show it."""
        return without_credentials(self.url)


@dataclass(slots=True)
class Sample:
    """The measurement of one request. Times are in seconds on the client's clock."""

    due: float
    """The time at which the request was due. Latencies count from here, so that delays of the client do not
    make the server look faster."""
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    """(time of arrival, bytes) of each chunk. `read_chunks` empties the list."""
    end: float = 0.0
    stamps: list[float] = field(default_factory=list)
    """Time of arrival of each piece of text."""
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    valid: bool | None = None
    """Whether the text is JSON that satisfies its schema; None if there is no schema."""
    schema: Any = None

    @property
    def ttft_s(self) -> float:
        """Time to the first text."""
        return self.stamps[0] - self.due

    @property
    def e2e_s(self) -> float:
        """Time to the last byte."""
        return self.end - self.due

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: the times between pieces of text. A piece has one token or more."""
        return [after - before for before, after in zip(self.stamps, self.stamps[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for fewer than two tokens."""
        if self.output_tokens < 2:
            return None
        return (self.stamps[-1] - self.stamps[0]) / (self.output_tokens - 1)


class LoadClient:
    """A client that sends streaming requests to one endpoint, any number at a time, over kept connections.

    Connections are kept only on Ramify's background loop (`ramify.loop`), so load tests must run there.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float | None = 600.0) -> None:
        self.endpoint = endpoint
        self._http = HttpClient(endpoint.url, endpoint.api_key, timeout_s=timeout_s)

    async def send(self, path: str, body: Mapping[str, Any], due: float | None = None) -> Sample:
        """Send one request and read its answer to the end. Failures are recorded in the sample, not
        raised."""
        request = {
            "model": self.endpoint.model,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        clock = time.perf_counter
        sample = Sample(clock() if due is None else due)
        try:
            async for data in self._http.stream(path, request):
                sample.chunks.append((clock(), data))
        except RamifyError as error:
            sample.error = f"{error.code}: {error.message}"
        sample.end = clock()
        return sample

    async def aclose(self) -> None:
        await self._http.aclose()


def read_chunks(sample: Sample) -> Sample:
    """Parse the chunks of `sample` into its other fields; returns `sample`. Chunks that were parsed before
    are not parsed again."""
    if sample.stamps or sample.error is not None:
        return sample
    rest = b""
    texts: list[str] = []
    for stamp, data in sample.chunks:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (event := line[5:].strip()) != b"[DONE]":
                _read_event(sample, stamp, event, texts)
    sample.chunks = []
    sample.text = "".join(texts)
    if sample.error is None and not sample.stamps:
        sample.error = "The server sent no text."
    return sample


def _read_event(sample: Sample, stamp: float, data: bytes, texts: list[str]) -> None:
    try:
        event = json.loads(data)
    except ValueError:
        sample.error = f"The server sent an event that is not JSON: {data[:100]!r}"
        return
    if event.get("error"):
        error = event["error"]
        sample.error = str(error.get("message") if isinstance(error, dict) else error)[:300]
    for choice in event.get("choices") or ():
        piece = choice.get("text") or (choice.get("delta") or {}).get("content")
        if piece:
            texts.append(piece)
            sample.stamps.append(stamp)
    usage = event.get("usage")
    if usage:
        sample.prompt_tokens = usage.get("prompt_tokens") or 0
        sample.output_tokens = usage.get("completion_tokens") or 0
        sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
