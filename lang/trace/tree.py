"""The tree of calls as text: a line for each step."""

from __future__ import annotations

from collections.abc import Iterator

from ramify.lang.trace.calls import Call, decided, label_of
from ramify.text import shortened

STEPS = ("program", "fork", "gen", "select", "decide", "tool", "recover")
MAX_TEXT, MAX_DECIDED = 40, 200
WAITS = {"grammar_s": "grammar", "queue_s": "queue"}
LEAST_WAIT_S, LEAST_WAIT = 0.005, 0.05
"""Shortest wait that is shown: in seconds, and as a share of the call's time."""


def render(call: Call) -> str:
    """The tree below `call` as text: a line for each step, with the numbers of computed, cached and generated
    tokens."""
    several = len(call.usage_by_model) > 1
    rows = list(_rows(call, "", "", several))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {figures}".rstrip() for label, figures in rows)


def _rows(call: Call, head: str, indent: str, models: bool) -> Iterator[tuple[str, str]]:
    """The (label, figures) of each step. With `models`, the label includes the name of the model."""
    model = f"  {call.model}" if models and call.model and call.kind != "tool" else ""
    yield head + label_of(call) + model, _figures(call)
    steps = [child for child in call.children if child.kind in STEPS] or _attempts(call)
    for child in steps:
        last = child is steps[-1]
        yield from _rows(
            child, indent + ("└─ " if last else "├─ "), indent + ("   " if last else "│  "), models
        )


def _attempts(call: Call) -> list[Call]:
    """The attempts of a step with `retries`, if there was more than one."""
    attempts = [child for child in call.children if child.kind == "attempt"]
    return attempts if len(attempts) > 1 else []


def _waits(call: Call) -> str:
    """The times that the request waited for its grammar and in the queue, if they are long; of several
    requests, those of the one that waited longest."""
    requests = [call] if _attempts(call) else [call, *call.children]
    known = [one.phases for one in requests if one.phases is not None]
    if not known:
        return ""
    longest = max(known, key=lambda phases: sum([phases[name] for name in WAITS]))
    least = max(LEAST_WAIT_S, LEAST_WAIT * (call.duration_s or 0.0))
    return "".join(
        [f"  {word} {longest[name]:.3f} s" for name, word in WAITS.items() if longest[name] >= least]
    )


def _figures(call: Call) -> str:
    usage = call.usage
    time = "  running" if call.duration_s is None else f"{call.duration_s:7.3f} s"
    if call.kind == "recover":
        lost, calls = call.dropped_usage, len(call.dropped)
        computed = lost.prompt_tokens - lost.cached_tokens
        return (
            f"{'':9}  dropped {calls} call{'s' * (calls != 1)}: computed {computed} + out "
            f"{lost.completion_tokens}  after: {shortened(call.text, MAX_TEXT)}"
        )
    text = shortened(call.text if call.error is None else call.error, MAX_TEXT)
    outcome = repr(text) if call.error is None else f"failed: {text}"
    if call.kind == "tool":
        outcome = f"{shortened(call.arguments or '', MAX_TEXT)} → {outcome}"
    if call.decisions and call.error is None:
        outcome = shortened(decided(call), MAX_DECIDED)
    if call.kind == "tool" and not call.requests:
        return f"{time}  {outcome}"
    thought = f", thinking {usage.reasoning_tokens}" if usage.reasoning_tokens else ""
    figures = (
        f"{time}  prompt {usage.prompt_tokens:5} = cached {usage.cached_tokens:5} + "
        f"computed {usage.prompt_tokens - usage.cached_tokens:5}  "
        f"out {usage.completion_tokens:4} (forced {usage.forced_tokens}{thought})"
    )
    if call.kind in ("program", "fork"):
        return figures
    how = _waits(call)
    if call.resent:
        how += f"  sent again {call.resent}x after {call.failures[-1].again_s - call.start_s:.3f} s"
    how += f"  stored {usage.stored_tokens}" * call.stored
    how += "  asked with the step before" * call.merged
    return f"{figures}{how}  {outcome}"
