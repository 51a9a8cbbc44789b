"""HTML of a trace for notebooks: a table of the calls, and lines with the totals of tokens and time."""

from __future__ import annotations

from ramify.html.fragment import details, escaped, fragment, head, table, tag, text
from ramify.lang.trace.calls import Call, decided, label_of
from ramify.messages import Usage

MAX_CALLS = 150


def call_html(root: Call) -> str:
    """A row for each call of a trace: its time, tokens and output, with the prompt folded."""
    calls = list(root.walk())
    several = len(root.usage_by_model) > 1
    ends = [call.end_s for call in calls if call.end_s is not None]
    span = (root.start_s, max([*ends, root.start_s + 1e-6]))
    rows = [_row(call, several, span, _depth(call, root)) for call in calls[:MAX_CALLS]]
    names = ["step", "time", "prompt", "cached", "output", "text"]
    parts = [
        head(label_of(root), *model_names(root)),
        table(rows, ["step", "model", *names[1:]] if several else names),
    ]
    if len(calls) > MAX_CALLS:
        parts.append(
            tag("div", f"{len(calls) - MAX_CALLS} more calls; state.trace.save(...) has all", "soft")
        )
    return fragment([*parts, usage_html(root)])


def _row(call: Call, several: bool, span: tuple[float, float], depth: int) -> list[str]:
    usage, programs = call.usage, call.kind in ("program", "fork")
    counts = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
    label = f'<span style="padding-left:{14 * min(depth, 12)}px">{escaped(label_of(call), 60)}</span>'
    took = "running" if call.duration_s is None else f"{call.duration_s:.3f} s"
    cells = [label + _bar(call, span), *([escaped(call.model)] if several else []), took]
    cells += ["" if call.kind == "tool" else f"{count:,}" for count in counts]
    return [*cells, "" if programs and call.error is None else _said(call)]


def _bar(call: Call, span: tuple[float, float]) -> str:
    start, end = span
    begin = (call.start_s - start) / (end - start)
    length = ((end if call.end_s is None else call.end_s) - call.start_s) / (end - start)
    return (
        '<div style="width:140px;height:3px;background:rgba(128,128,128,.18)"><div style="height:3px;'
        f"margin-left:{100 * min(max(begin, 0), 1):.1f}%;width:{100 * min(max(length, 0), 1):.1f}%;"
        'min-width:1px;max-width:100%;background:rgba(64,132,214,.8)"></div></div>'
    )


def _said(call: Call) -> str:
    cell = tag("div", escaped(call.error), "bad") if call.error is not None else ""
    if call.kind == "tool":
        cell += text([(f"{call.arguments or ''} → {call.text}", False)])
    elif call.text:
        cell += text([(decided(call) if call.decisions else call.text, not call.decisions)])
    if call.prompt_end is not None and call.sent:
        cell += details("prompt", text([(call.prompt, False)], end=True))
    if call.line is not None and call.error is not None:
        cell += tag("div", tag("code", escaped(call.line)), "soft")
    return cell


def _depth(call: Call, root: Call) -> int:
    depth = 0
    while call is not root and call.parent is not None:
        call, depth = call.parent, depth + 1
    return depth


# --- usage --------------------------------------------------------------------------------------


def model_names(call: Call) -> list[str]:
    """One line, with the names of the models, if there are several models; else an empty list."""
    models = list(call.usage_by_model)
    return [" · ".join(models)] if len(models) > 1 else []


def usage_lines(call: Call) -> list[str]:
    """A line with the total tokens and the time. If there are several models, also a line for each model."""
    took = "" if call.duration_s is None else f" · {call.duration_s:.2f} s"
    lines = [f"{call.requests} request{'s' * (call.requests != 1)} · {_tokens(call.usage)}{took}"]
    by_model = call.usage_by_model
    if len(by_model) > 1:
        lines += [f"{model}: {_tokens(usage)}" for model, usage in by_model.items()]
    return lines


def usage_html(call: Call) -> str:
    return "".join(tag("div", escaped(line), "soft") for line in usage_lines(call))


def _tokens(usage: Usage) -> str:
    cached = f" ({usage.cached_tokens / usage.prompt_tokens:.0%} cached)" if usage.prompt_tokens else ""
    forced = f" ({usage.forced_tokens:,} forced)" if usage.forced_tokens else ""
    return (
        f"{usage.prompt_tokens:,} prompt tokens{cached} · {usage.completion_tokens:,} output tokens{forced}"
    )
