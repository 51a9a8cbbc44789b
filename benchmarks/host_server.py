"""The server's own time for a request: everything but the model.

    python -m benchmarks.host --server [--requests 300] [--rounds 3]

Starts `ramify serve` over a model of one layer of 64, with the default model's tokenizer and chat template.
One client sends requests over one connection, each after the answer to the one before: requests share no
work, so this is what a single user's request costs.

Outside the model: the processor time of all threads of the server's processes (clock_getcpuclockid(3)), less
the time of forward passes, logits and scoring (`ramify_model_seconds_total`). So sampling, masks, messages,
HTTP, logs and metrics count, and so does what the processes do while idle. The client does not count. Passes
run on one thread, and the scheduler has a core of its own, so that their time is processor time: on a machine
that does nothing else.

Speculation is off, so a step gives one token. `token` rows are the difference of two cases that differ in the
length of the answer, divided by the difference in tokens. Prints ms of processor time of each process: the
medians of the rounds, and the least and the most of the sums.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import re
import statistics
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import random_gguf
from tests.end_to_end.served import serve

SIZE = "one-layer"
ONE, SHORT, LONG = 1, 16, 80
"""Output tokens of the cases."""
ROLES = ("server", "tokenizer", "scheduler", "detokenizer")
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["bug", "question", "praise"]}, "score": {"enum": [1, 2, 3]}},
    "required": ["kind", "score"],
    "additionalProperties": False,
}
TEXT = "Say whether the lamp is sold without its shade. Letter"
"""Text of each prompt, before a number that tells it from the others: 47 tokens with the chat template."""


class Case(NamedTuple):
    name: str
    path: str
    body: dict[str, Any]
    share: int = 1
    """The requests of other cases for each one of this case."""


def _cases() -> dict[str, Case]:
    chat, completion = "/v1/chat/completions", "/v1/completions"
    one, short, long = ({"max_tokens": most, "ignore_eos": True} for most in (ONE, SHORT, LONG))
    form = {"type": "json_schema", "json_schema": {"name": "sort", "schema": SCHEMA}}
    cases = (
        Case("chat of one token", chat, one),
        Case("chat", chat, short),
        Case("chat, streamed", chat, short | {"stream": True}),
        Case("completion", completion, short),
        Case("chat with a schema", chat, {"response_format": form, "max_tokens": 40}),
        Case("long chat, streamed", chat, long | {"stream": True}, share=LONG // SHORT),
    )
    return {case.name: case for case in cases}


CASES = _cases()
TOKENS = {
    "token of a chat": ("chat", "chat of one token"),
    "token of a streamed chat": ("long chat, streamed", "chat, streamed"),
}
"""Row → the cases of which it is the difference."""


class Costs(dict[str, float]):
    """Role → ms of processor time outside the model; also "model", the time that was subtracted."""

    @property
    def total(self) -> float:
        return sum(self[role] for role in ROLES)


class Client:
    """One connection to the server at `url`."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc)
        self._numbers = iter(range(1000, 1 << 30))

    def close(self) -> None:
        self._connection.close()

    def call(self, method: str, path: str, body: Any = None) -> bytes:
        sent = None if body is None else json.dumps(body)
        self._connection.request(method, path, sent, {"content-type": "application/json"})
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path} was answered with {answer.status}: {content.decode()}")
        return content

    def send(self, case: Case) -> bytes:
        """The answer to a request of `case` with a new prompt."""
        text = f"{TEXT} {next(self._numbers)}."
        prompt = (
            {"messages": [{"role": "user", "content": text}]} if "chat" in case.path else {"prompt": text}
        )
        return self.call("POST", case.path, {"model": "default", "temperature": 0.0, **prompt, **case.body})

    def model_s(self) -> float:
        """Seconds of forward passes, logits and scoring so far."""
        found = re.search(rb"^ramify_model_seconds_total (\S+)$", self.call("GET", "/metrics"), re.MULTILINE)
        assert found is not None
        return float(found[1])


def processor_clock(pid: int) -> int:
    """The number of the clock that counts the processor time of all threads of the process `pid`."""
    clock = ctypes.c_int()
    error = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise OSError(error, f"there is no clock of the process {pid}")
    return clock.value


def measure(client: Client, clocks: dict[str, int], case: Case, requests: int) -> Costs:
    """The costs of one request of `case`, the mean of `requests` of them."""
    model_s = client.model_s()
    before = {role: time.clock_gettime(clock) for role, clock in clocks.items()}
    for _ in range(requests):
        client.send(case)
    spent = {role: time.clock_gettime(clock) - before[role] for role, clock in clocks.items()}
    spent["model"] = client.model_s() - model_s
    spent["scheduler"] -= spent["model"]
    return Costs({role: 1e3 * seconds / requests for role, seconds in spent.items()})


def check(case: Case, answer: bytes) -> None:
    """Raise `RuntimeError` unless `answer` has the tokens that `case` asks for, one an event if streamed."""
    most = case.body["max_tokens"]
    if case.body.get("stream"):
        found = answer.count(b"data: ")
        good = found > most // 2  # unfinished characters are held back
    else:
        found = json.loads(answer)["usage"]["completion_tokens"]
        good = found == most or ("response_format" in case.body and 5 < found <= most)
    if not good:
        raise RuntimeError(f"An answer of {case.name!r} has {found} tokens or events for {most} tokens.")


def rounds(requests: int, count: int) -> Iterator[dict[str, Costs]]:
    """The costs of each row of the table, in `count` rounds over one server. A round has `requests` requests
    of each case, and fewer of a long one."""
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "model.gguf"
        random_gguf.write(SIZE, "Q4_0", weights)
        options = ("--threads", "1", "--no-speculation", "--num-pages", "4096")
        with serve("--model", str(weights), *options) as server, closing(Client(server.url)) as client:
            (replica,) = json.loads(client.call("GET", "/replicas"))["replicas"]
            pids = {"server": server.process.pid} | replica["pids"]
            clocks = {role: processor_clock(pids[role]) for role in ROLES}
            core, *others = os.sched_getaffinity(0)
            others = others or [core]
            for role, pid in pids.items():
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(thread), {core} if role == "scheduler" else others)
            for case in CASES.values():
                check(case, client.send(case))  # the first request with a schema waits for its grammar
            for case in CASES.values():
                measure(client, clocks, case, -(-requests // 10))
            for _ in range(count):
                found = {
                    name: measure(client, clocks, case, -(-requests // case.share))
                    for name, case in CASES.items()
                }
                for name, (longer, shorter) in TOKENS.items():
                    tokens = CASES[longer].body["max_tokens"] - CASES[shorter].body["max_tokens"]
                    pairs = ((role, found[longer][role] - found[shorter][role]) for role in found[longer])
                    found[name] = Costs({role: more / tokens for role, more in pairs})
                yield found


def report(requests: int, count: int) -> None:
    columns = (*ROLES, "sum")
    found = list(rounds(requests, count))
    print(f"{'ms of processor time':26}", *(f"{name:>12}" for name in columns), "   least, most       model")
    for name in found[0]:
        costs = [each[name] for each in found]
        medians = [statistics.median(cost[role] for cost in costs) for role in ROLES]
        totals = [cost.total for cost in costs]
        figures = "".join(f"{figure:13.3f}" for figure in (*medians, statistics.median(totals)))
        model = statistics.median(cost["model"] for cost in costs)
        print(f"{name:26}{figures}   {min(totals):.3f}, {max(totals):.3f} {model:11.3f}", flush=True)
