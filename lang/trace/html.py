"""HTML of a trace for notebooks: the tree of the calls, each with its time, tokens and output.

The tree is nested lists, so that it stays one where a viewer of notebooks drops styles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ramify.html.fragment import details, escaped, fragment, head, tag, text
from ramify.lang.trace.calls import Call, decided, label_of
from ramify.messages import Usage

MAX_CALLS = 150
SHOWN = 240
"""Number of characters of an output that are shown. Further characters are folded."""
GENERATED = ("gen", "select", "sample", "attempt")
"""The kinds of calls whose text a model has written."""


def call_html(root: Call) -> str:
    """The tree of a trace: for each call its time, tokens and output, with the prompt folded."""
    total = sum(1 for _ in root.walk())
    tree = tag("ul", "".join(_Tree(root).items([root])), "tree")
    parts = [head("Trace", *model_names(root)), tree]
    if total > MAX_CALLS:
        parts.append(tag("div", f"{total - MAX_CALLS} more calls; state.trace.save(...) has all", "soft"))
    return fragment([*parts, usage_html(root)])


class _Tree:
    """The first `MAX_CALLS` calls below `root` as list items."""

    def __init__(self, root: Call) -> None:
        self._several = len(root.usage_by_model) > 1
        self._left = MAX_CALLS
        ends = [call.end_s for call in root.walk() if call.end_s is not None]
        self._start, self._end = root.start_s, max([*ends, root.start_s + 1e-6])

    def items(self, calls: Sequence[Call]) -> Iterator[str]:
        for call, below in _nested(calls):
            if not self._left:
                return
            self._left -= 1
            row = tag("span", self._row(call), "row")
            said, inner = _said(call, folded=len(below) > len(call.children)), "".join(self.items(below))
            if inner:
                content = f"<details open><summary>{row}</summary>{said}{tag('ul', inner)}</details>"
            else:
                content = tag("div", row, "leaf") + said
            yield tag("li", content)

    def _row(self, call: Call) -> str:
        facts = ["running" if call.duration_s is None else f"{call.duration_s:.3f} s", *_tokens_of(call)]
        if self._several and call.model:
            facts.append(escaped(call.model))
        label = tag("span", escaped(label_of(call), 60), "name")
        return f"{label} {tag('span', ' · '.join(facts), 'soft')} {self._bar(call)}"

    def _bar(self, call: Call) -> str:
        span = self._end - self._start
        begin = (call.start_s - self._start) / span
        length = ((self._end if call.end_s is None else call.end_s) - call.start_s) / span
        left, width = 100 * min(max(begin, 0), 1), 100 * min(max(length, 0), 1)
        return (
            '<span class="bar"><span style="'
            f'margin-left:min({left:.1f}%,100% - 2px);width:{width:.1f}%"></span></span>'
        )


def _nested(calls: Sequence[Call]) -> list[tuple[Call, list[Call]]]:
    """Each of `calls` with the calls that are shown below it. Calls of tools are shown below the step that
    wrote them."""
    found: list[tuple[Call, list[Call]]] = []
    for call in calls:
        step = next((below for other, below in reversed(found) if other.kind == "gen"), None)
        if call.kind == "tool" and step is not None:
            step.append(call)
        else:
            found.append((call, [*call.children]))
    return found


def _tokens_of(call: Call) -> Iterator[str]:
    usage = call.usage
    if call.kind != "tool" and usage.prompt_tokens:
        cached = f" ({usage.cached_tokens:,} cached)" if usage.cached_tokens else ""
        yield f"{usage.prompt_tokens:,} prompt{cached}"
        yield f"{usage.completion_tokens:,} output"


def _said(call: Call, *, folded: bool) -> str:
    """The output, the error and the prompt of a call. With `folded`, the output is folded, because the calls
    below it show it."""
    parts = []
    if call.kind == "tool":
        result = "" if call.error is not None else f" → {call.text}"
        parts.append(text([((call.arguments or "") + result, False)], fold=SHOWN))
    elif call.text and call.kind not in ("program", "fork"):
        shown = decided(call) if call.decisions else call.text
        output = text([(shown, call.kind in GENERATED)], fold=SHOWN)
        parts.append(details("output", output) if folded else output)
    if call.error is not None:
        parts.append(tag("div", escaped(call.error), "bad"))
        if call.line is not None and call.line not in call.error:
            parts.append(tag("div", tag("code", escaped(call.line)), "soft"))
    if call.prompt_end is not None and call.sent:
        parts.append(details("prompt", text([(call.prompt, False)], end=True)))
    return tag("div", "".join(parts), "said") if parts else ""


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
