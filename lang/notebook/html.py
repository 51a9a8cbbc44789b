"""The HTML of states, traces and batches in notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ramify.html.fragment import Run, details, escaped, fragment, head, table, tag, text
from ramify.lang.calls.tool_turns import CallTurn, Describe
from ramify.lang.program.variables import Skipped
from ramify.lang.prompt.chat import Begin, End, Thought
from ramify.lang.prompt.transcript import Generated, Piece, pieces
from ramify.lang.trace.calls import Call, label_of

if TYPE_CHECKING:
    from ramify.lang.batch.results import BatchSummary
    from ramify.lang.program.branch import Branch
    from ramify.lang.program.variables import Variable
    from ramify.lang.state.state import ProgramState
    from ramify.messages import Usage

MAX_TURNS = 40
"""Turns of a branch that are shown; with more, the earliest are counted."""
MAX_BRANCHES = 16
MAX_VARIABLES = 50
MAX_VALUE = 500
"""Characters of a variable's value."""
MAX_CALLS = 150


# --- states -------------------------------------------------------------------------------------


def state_html(state: ProgramState) -> str:
    """The turns with their generated parts, the variables, the error and the usage of a state."""
    branch, run = state._branch, state._branch.run
    error = branch.error or run.error
    parts = [head(run.root.call.name, state._status, *_models(branch.call)), *_content(branch)]
    if error is not None:
        parts.append(_error(str(error), error.line, error.partial))
    if branch.variables:
        parts.append(details("Variables", _variables(dict(branch.variables)), open=True))
    if state.ret_value is not None and not isinstance(state.ret_value, type(state)):
        parts.append(table([("returned", tag("code", escaped(_repr(state.ret_value), MAX_VALUE)))]))
    parts.append(_usage(branch.call))
    return fragment(parts)


def _content(branch: Branch, since: Piece | None = None) -> Iterator[str]:
    """The turns and texts of a branch after `since`, then its branches."""
    turns = [*_turns(branch, since)]
    if len(turns) > MAX_TURNS:
        yield tag("div", f"{len(turns) - MAX_TURNS} earlier turns", "soft")
    yield from turns[-MAX_TURNS:]
    for child in branch.children[:MAX_BRANCHES]:
        yield details(child.call.name, "".join(_content(child, child.fork_point)))
    if len(branch.children) > MAX_BRANCHES:
        yield tag("div", f"{len(branch.children) - MAX_BRANCHES} more branches", "soft")


def _turns(branch: Branch, since: Piece | None) -> Iterator[str]:
    role = branch.dialogue.role if branch.dialogue.start is since and since is not None else None
    runs: list[Run] = []
    thoughts: list[str] = []
    for piece in pieces(branch.tail, since):
        match piece.mark:
            case Begin(role=begun):
                yield from _turn(role, runs)
                role, runs = begun, []
            case End():
                yield from _turn(role, runs, thoughts)
                role, runs, thoughts = None, [], []
            case Thought() as thought:
                thoughts += [thought.thoughts] if thought.thoughts else []
                runs.append((thought.head, True))
            case CallTurn() as turn:
                yield from _turn(role, runs)
                runs = []
                yield _call_turn(turn)
            case Describe() as described:
                names = ", ".join(tool.name for tool in described.tools)
                runs.append((f"\n[tools: {names}]" if runs else f"[tools: {names}]", False))
            case None | Generated():
                runs.append((piece.text, piece.generated))
    if (variable := branch.running) is not None:
        runs += [(chunk.text, True) for chunk in list(variable.chunks)]
    yield from _turn(role, runs, thoughts)


def _turn(role: str | None, runs: list[Run], thoughts: Sequence[str] = ()) -> Iterator[str]:
    folded = "".join(details("thoughts", text([(thought, True)])) for thought in thoughts)
    if role is not None:
        yield tag("div", tag("span", escaped(role), "role") + folded + text(runs), f"turn {role}")
        return
    if folded:
        yield folded
    if any(part.strip() for part, _ in runs):
        yield text(runs)


def _call_turn(turn: CallTurn) -> str:
    rows = [
        (tag("code", tag("mark", escaped(f"{name}({arguments})"))), escaped(shown))
        for (name, arguments), shown in zip(turn.written, turn.shown, strict=True)
    ]
    said = text([(turn.words, True)]) if turn.words else ""
    called = table(rows, ("call", "result")) if rows else ""
    return tag("div", tag("span", "assistant", "role") + said + called, "turn assistant")


def _variables(variables: dict[str, Variable]) -> str:
    rows = [(tag("code", escaped(name)), _value(variable)) for name, variable in variables.items()]
    left = len(rows) - MAX_VARIABLES
    more = tag("div", f"{left} more", "soft") if left > 0 else ""
    return table(rows[:MAX_VARIABLES]) + more


def _value(variable: Variable) -> str:
    if not variable.ready.is_set():
        return tag("span", "not set yet", "soft")
    if variable.error is not None:
        return tag("span", "skipped" if isinstance(variable.error, Skipped) else "failed", "soft")
    return tag("code", escaped(_repr(variable.value), MAX_VALUE))


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"


def _error(message: str, line: str | None, partial: str | None) -> str:
    where = tag("div", tag("code", escaped(line)), "soft") if line and line not in message else ""
    rest = details("partial output", text([(partial, True)])) if partial else ""
    return tag("div", escaped(message) + where + rest, "bad")


# --- usage --------------------------------------------------------------------------------------


def _models(call: Call) -> list[str]:
    """The names of the models, if there are several."""
    models = list(call.usage_by_model)
    return [" · ".join(models)] if len(models) > 1 else []


def usage_lines(call: Call) -> list[str]:
    """A line of the tokens and the time, and a line for each model if there are several."""
    took = "" if call.duration_s is None else f" · {call.duration_s:.2f} s"
    lines = [f"{call.requests} request{'s' * (call.requests != 1)} · {_tokens(call.usage)}{took}"]
    by_model = call.usage_by_model
    if len(by_model) > 1:
        lines += [f"{model}: {_tokens(usage)}" for model, usage in by_model.items()]
    return lines


def _usage(call: Call) -> str:
    return "".join(tag("div", escaped(line), "soft") for line in usage_lines(call))


def _tokens(usage: Usage) -> str:
    cached = f" ({usage.cached_tokens / usage.prompt_tokens:.0%} cached)" if usage.prompt_tokens else ""
    forced = f" ({usage.forced_tokens:,} forced)" if usage.forced_tokens else ""
    return (
        f"{usage.prompt_tokens:,} prompt tokens{cached} · {usage.completion_tokens:,} output tokens{forced}"
    )


# --- traces -------------------------------------------------------------------------------------


def call_html(root: Call) -> str:
    """A row for each call of a trace: its time, tokens and output, with the prompt folded."""
    calls = list(root.walk())
    several = len(root.usage_by_model) > 1
    ends = [call.end_s for call in calls if call.end_s is not None]
    span = (root.start_s, max([*ends, root.start_s + 1e-6]))
    rows = [_row(call, several, span, _depth(call, root)) for call in calls[:MAX_CALLS]]
    names = ["step", "time", "prompt", "cached", "output", "text"]
    parts = [
        head(label_of(root), *_models(root)),
        table(rows, ["step", "model", *names[1:]] if several else names),
    ]
    if len(calls) > MAX_CALLS:
        parts.append(
            tag("div", f"{len(calls) - MAX_CALLS} more calls; state.trace.save(...) has all", "soft")
        )
    return fragment([*parts, _usage(root)])


def _row(call: Call, several: bool, span: tuple[float, float], depth: int) -> list[str]:
    usage, programs = call.usage, call.kind in ("program", "fork")
    counts = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
    label = f'<span style="padding-left:{14 * min(depth, 12)}px">{escaped(label_of(call), 60)}</span>'
    took = "running" if call.duration_s is None else f"{call.duration_s:.3f} s"
    cells = [label + _bar(call, span), *([escaped(call.model)] if several else []), took]
    cells += ["" if call.kind == "tool" else f"{count:,}" for count in counts]
    return [*cells, "" if programs and call.error is None else _said(call)]


def _bar(call: Call, span: tuple[float, float]) -> str:
    """When the call ran, as a bar."""
    start, end = span
    begin = (call.start_s - start) / (end - start)
    length = ((end if call.end_s is None else call.end_s) - call.start_s) / (end - start)
    return (
        '<div style="width:140px;height:3px;background:rgba(128,128,128,.18)"><div style="height:3px;'
        f"margin-left:{100 * min(max(begin, 0), 1):.1f}%;width:{100 * min(max(length, 0), 1):.1f}%;"
        'min-width:1px;max-width:100%;background:rgba(64,132,214,.8)"></div></div>'
    )


def _said(call: Call) -> str:
    """The output of a call or its error, and its prompt or arguments, folded."""
    cell = tag("div", escaped(call.error), "bad") if call.error is not None else ""
    if call.kind == "tool":
        cell += text([(f"{call.arguments or ''} → {call.text}", False)])
    elif call.text:
        cell += text([(call.text, True)])
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


# --- batches ------------------------------------------------------------------------------------


def batch_html(summary: BatchSummary) -> str:
    """The figures of a batch, and what went wrong."""
    rows = [
        ("rows", f"{summary.rows:,}", f"{summary.rows_per_s:.1f} a second"),
        ("failed", f"{summary.failed:,}", ""),
        ("done before", f"{summary.skipped:,}", ""),
        (
            "output tokens",
            f"{summary.usage.completion_tokens:,}",
            f"{summary.output_tokens_per_s:.0f} a second",
        ),
        ("prompt tokens", f"{summary.usage.prompt_tokens:,}", f"{summary.cached_share:.0%} cached"),
    ]
    parts = [head("Batch", f"{summary.duration_s:.1f} s"), table(rows)]
    if summary.first_error is not None:
        parts.append(tag("div", f"first error: {escaped(summary.first_error)}", "bad"))
    if summary.stopped is not None:
        left = f"stopped: {summary.stopped}\n{summary.left} rows are left; run the same again to go on"
        parts.append(tag("div", escaped(left), "bad"))
    return fragment(parts)
