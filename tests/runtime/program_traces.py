"""Traces of programs: the times and tokens of their calls, generated from a seed or read from files.

Times are those of a machine that is never short of resources: `PREFILL_S` for each prompt token that is new
to the program, and `DECODE_S` for each output token. Waits for tools and people between calls are drawn from
log-normal distributions: most are short, some very long.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ramify.messages import NextUse, ProgramHint

PREFILL_S = 1 / 20_000
DECODE_S = 1 / 100
LEASE_S = 60.0
TOOLS = {"look up": (0.05, 0.35), "search": (1.0, 0.3), "fetch": (4.0, 0.2), "test": (25.0, 0.15)}
"""Tool → (median seconds of a call, probability that it is chosen)."""

Tokens = npt.NDArray[np.int32]


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """A request. `prompt` and `output` are token ids; times are in seconds."""

    start_s: float
    end_s: float
    prompt: Tokens
    output: Tokens
    hint: ProgramHint | None = None
    tools: tuple[str, ...] = ()
    """Tools for which the program waits after this call."""
    forks: tuple[int, ...] = ()
    """Numbers of tokens after which other branches diverge. Given in the first call of a branch."""


@dataclasses.dataclass(slots=True)
class Trace:
    calls: list[Call]
    ends: list[tuple[float, str]]
    """(time, program) of the end of each program."""

    def merged(self, other: Trace) -> Trace:
        return Trace(self.calls + other.calls, self.ends + other.ends)


class Branch:
    """A branch of a program: its tokens and its calls. Each call advances the branch's time."""

    def __init__(self, program: ProgramWriter, held: Tokens, now: float, forks: tuple[str, ...] = ()) -> None:
        self._program = program
        self._told = (len(held),) if forks else ()
        self.held = held
        self.now = now
        self.key = program.key("b")
        self.forks = forks

    def say(self, tokens: Tokens) -> Branch:
        self.held = np.concatenate([self.held, tokens])
        return self

    def call(self, output: int, next_use: NextUse = "unknown", new: int | None = None) -> Branch:
        """Generate `output` tokens; `new` tokens of the prompt have to be computed (None: all)."""
        program = self._program
        fresh = len(self.held) if new is None else new
        done = self.now + fresh * PREFILL_S + output * DECODE_S
        answer = program.dice.tokens(output)
        hint = ProgramHint(
            program=program.name,
            name=program.kind,
            lease_s=LEASE_S,
            next_use=next_use,
            branch=self.key,
            forks=self.forks,
            ended=program.take_ended(),
        )
        program.calls.append(Call(self.now, done, self.held, answer, hint, forks=self._told))
        self._told = ()
        self.held = np.concatenate([self.held, answer])
        self.now = done
        return self

    def wait(self, seconds: float) -> Branch:
        self.now += seconds
        return self

    def use_tool(self) -> Branch:
        """Wait for the tool that the last call has asked for."""
        dice = self._program.dice
        tool = str(dice.rng.choice(list(TOOLS), p=[share for _, share in TOOLS.values()]))
        self._program.calls[-1].tools = (tool,)
        return self.wait(dice.wait(TOOLS[tool][0], 0.5, 120.0))

    def fork(self, size: int) -> list[Branch]:
        fork = self._program.key("f")
        return [Branch(self._program, self.held, self.now, (*self.forks, fork)) for _ in range(size)]

    def join(self, branches: Sequence[Branch]) -> Branch:
        """Wait for `branches`, and end them."""
        self.now = max(self.now, *(branch.now for branch in branches))
        self._program.ended += [branch.key for branch in branches]
        self._program.ended.append(branches[0].forks[-1])
        return self


class Dice:
    """A source of random tokens, lengths and waits."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.prompts = [self.tokens(length) for length in (1800, 1200, 900, 500, 300, 250)]
        """System prompts; programs of one kind share theirs."""

    def tokens(self, count: int) -> Tokens:
        return self.rng.integers(0, 100_000, count, dtype=np.int32)

    def between(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def wait(self, median: float, spread: float, most: float) -> float:
        return min(float(self.rng.lognormal(np.log(median), spread)), most)


class ProgramWriter:
    def __init__(self, kind: str, number: int, dice: Dice) -> None:
        self.kind = kind
        self.name = f"{kind}{number}"
        self.dice = dice
        self.calls: list[Call] = []
        self.ended: list[str] = []
        self._keys = itertools.count()

    def key(self, kind: str) -> str:
        return f"{kind}{next(self._keys)}"

    def take_ended(self) -> tuple[str, ...]:
        ended, self.ended = tuple(self.ended), []
        return ended


# --- kinds of programs ----------------------------------------------------------------------------


def agent(root: Branch, dice: Dice) -> None:
    """An agent: calls and tools in turn, with a growing context."""
    new = dice.between(100, 600)
    root.say(dice.prompts[dice.between(0, 2)]).say(dice.tokens(new))
    for _ in range(dice.between(4, 20)):
        root.call(dice.between(40, 200), "tool", new)
        root.use_tool()
        new = dice.between(80, 1200)
        root.say(dice.tokens(new))
    root.call(dice.between(100, 300), "unknown", new)


def chat(root: Branch, dice: Dice) -> None:
    """A chat with a person, who thinks between the turns."""
    new = dice.between(30, 250)
    pace = dice.wait(15.0, 0.7, 120.0)
    root.say(dice.prompts[3]).say(dice.tokens(new))
    for _ in range(dice.between(2, 9)):
        root.call(dice.between(80, 400), "unknown", new)
        root.wait(dice.wait(pace, 0.6, 300.0))
        new = dice.between(20, 250)
        root.say(dice.tokens(new))
    root.call(dice.between(80, 400), "unknown", new)


def tree_of_thought(root: Branch, dice: Dice) -> None:
    """Tree of thoughts: three levels of judged proposals. Only the best two of a level go on."""
    root.say(dice.prompts[4]).say(dice.tokens(dice.between(300, 1500)))
    best = [root]
    for _ in range(3):
        proposals = [child for one in best for child in one.fork(4)]
        now = max(one.now for one in best)
        for child in proposals:
            child.now = now
            child.say(dice.tokens(20)).call(dice.between(100, 250), "soon", 20)
            child.say(dice.tokens(15)).call(4, "unknown", 15)
        chosen = dice.rng.permutation(len(proposals))[:2]
        now = max(one.now for one in proposals)
        best = [proposals[index] for index in chosen]
        for one in best:
            one.now = now
    best[0].say(dice.tokens(20)).call(200, "unknown", 20)
    root.now = best[0].now


def judge(root: Branch, dice: Dice) -> None:
    """An essay judged from five sides in parallel, then a verdict on all five."""
    root.say(dice.prompts[5]).say(dice.tokens(dice.between(1000, 5000)))
    for _ in range(2):
        sides = root.fork(5)
        for side in sides:
            side.say(dice.tokens(25)).call(dice.between(80, 200), "never", 25)
        root.join(sides).say(dice.tokens(120)).call(dice.between(60, 200), "soon", 120)
        root.say(dice.tokens(60))


def map_reduce(root: Branch, dice: Dice) -> None:
    """Map-reduce: summaries of a document's pieces with one instruction, then a summary of all."""
    root.say(dice.prompts[5]).say(dice.tokens(100))
    pieces = root.fork(dice.between(4, 12))
    for piece in pieces:
        length = dice.between(600, 2000)
        piece.say(dice.tokens(length)).call(dice.between(80, 160), "never", length)
    root.join(pieces).say(dice.tokens(120 * len(pieces))).call(300, "unknown", 120 * len(pieces))


KINDS: dict[str, tuple[Callable[[Branch, Dice], None], float]] = {
    "agent": (agent, 0.30),
    "chat": (chat, 0.25),
    "tree": (tree_of_thought, 0.08),
    "judge": (judge, 0.15),
    "map": (map_reduce, 0.07),
}
"""Kind of program → (function that writes it, number of programs that begin in a second)."""

ONE_SHOT_PER_S = 2.0
"""Requests a second that belong to no program. A third of them begin with a shared system prompt."""


def generate(seed: int, seconds: float, rate: float = 1.0, kinds: Sequence[str] = (*KINDS, "plain")) -> Trace:
    """Programs that begin within `seconds`, at `rate` times the rates of `KINDS`."""
    dice = Dice(seed)
    trace = Trace([], [])
    for kind, (body, per_s) in KINDS.items():
        for number, began in enumerate(_arrivals(dice, per_s * rate, seconds) if kind in kinds else ()):
            writer = ProgramWriter(kind, number, dice)
            root = Branch(writer, dice.tokens(0), began)
            body(root, dice)
            trace.calls += writer.calls
            trace.ends.append((max(call.end_s for call in writer.calls), writer.name))
    for began in _arrivals(dice, ONE_SHOT_PER_S * rate, seconds) if "plain" in kinds else ():
        prompt = dice.tokens(dice.between(100, 1500))
        if dice.rng.random() < 1 / 3:
            prompt = np.concatenate([dice.prompts[4], prompt])
        output = dice.between(20, 300)
        ended = began + len(prompt) * PREFILL_S + output * DECODE_S
        trace.calls.append(Call(began, ended, prompt, dice.tokens(output)))
    return trace


def _arrivals(dice: Dice, per_s: float, seconds: float) -> Iterator[float]:
    now = float(dice.rng.exponential(1 / per_s))
    while now < seconds:
        yield now
        now += float(dice.rng.exponential(1 / per_s))


# --- recorded runs --------------------------------------------------------------------------------


def recorded(paths: Sequence[Path], copies: int, every: float, seed: int) -> Trace:
    """A trace of recorded runs: JSON files with results of ``state.trace.to_dict()``, or lists of them.

    A record has numbers of tokens, but no tokens. Of a request's tokens, ``prompt_tokens - distinct_tokens``
    are shared with earlier requests of its run. They are taken from the latest long enough request of its
    branch, else of the branches above it, else of any branch. Every run is replayed `copies` times with
    different tokens; a run begins every `every` seconds.
    """
    dice = Dice(seed)
    trace = Trace([], [])
    runs = [run for path in paths for run in _runs(json.loads(path.read_text(encoding="utf-8")))]
    for number in range(copies * len(runs)):
        writer = ProgramWriter("recorded", number, dice)
        Recorded(writer, number * every).add(runs[number % len(runs)], "b", ())
        trace.calls += writer.calls
        if writer.calls:
            trace.ends.append((max(call.end_s for call in writer.calls), writer.name))
    return trace


def _runs(data: Any) -> list[dict[str, Any]]:
    return data if isinstance(data, list) else [data]


class Recorded:
    """A recorded run, replayed from the time `began` on."""

    def __init__(self, writer: ProgramWriter, began: float) -> None:
        self._writer = writer
        self._began = began
        self._held: list[tuple[str, Tokens]] = []
        """(branch, tokens) of each request so far."""

    def add(self, call: dict[str, Any], branch: str, forks: tuple[str, ...]) -> None:
        """Replay the requests below `call` in the order of their times."""
        work = sorted(_requests(call, branch, forks), key=lambda found: found[0]["start_s"])
        for (request, where, inside), later in zip(work, [*work[1:], None], strict=True):
            self._request(request, where, inside, last=later is None)

    def _request(self, call: dict[str, Any], branch: str, forks: tuple[str, ...], last: bool) -> None:
        length, distinct = call["prompt_tokens"], call["distinct_tokens"]
        prompt = np.concatenate([self._known(length - distinct, branch), self._writer.dice.tokens(distinct)])
        answer = self._writer.dice.tokens(max(call["completion_tokens"], 1))
        self._held.append((branch, np.concatenate([prompt, answer[:-1]])))
        hint = ProgramHint(
            program=self._writer.name,
            lease_s=LEASE_S,
            next_use="never" if last else "tool" if call["tools"] else "unknown",
            branch=branch,
            forks=forks,
        )
        start = self._began + call["start_s"]
        end = self._began + (call["end_s"] if call["end_s"] is not None else call["start_s"])
        self._writer.calls.append(Call(start, end, prompt, answer, hint, call["tools"]))

    def _known(self, count: int, branch: str) -> Tokens:
        """The first `count` tokens of the latest long enough request near `branch`, else random tokens."""
        enough = [(where, tokens) for where, tokens in self._held if len(tokens) >= count]
        if not enough:
            return self._writer.dice.tokens(count)
        nearest = max(range(len(enough)), key=lambda at: (_shared_path(enough[at][0], branch), at))
        return enough[nearest][1][:count]


def _shared_path(one: str, other: str) -> int:
    pairs = zip(one.split("/"), other.split("/"), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _requests(
    call: dict[str, Any], branch: str, forks: tuple[str, ...]
) -> Iterator[tuple[dict[str, Any], str, tuple[str, ...]]]:
    """Yield the requests below `call`, each with its branch and forks, and the tools called after it."""
    children = call["children"]
    for index, child in enumerate(children):
        if child["kind"] == "fork":
            yield from _requests(child, f"{branch}/{index}", (*forks, branch))
        elif any(below["kind"] != "tool" for below in child["children"]):
            yield from _requests(child, branch, forks)
        elif child["kind"] != "tool":
            tools = [below["name"] for below in child["children"]]
            for after in children[index + 1 :]:
                if after["kind"] != "tool":
                    break
                tools.append(after["name"])
            yield {**child, "tools": tuple(tools)}, branch, forks
