"""The report of a trace: one HTML file, made of the template `report.html` and the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from typing import Any

from ramify.decisions.layouts import written
from ramify.html.template import fill, script
from ramify.lang.prompt.transcript import Piece, pieces
from ramify.lang.trace.calls import Call
from ramify.lang.trace.misses import Misses, token_texts
from ramify.lang.trace.outputs import Span, scores_of


def report(call: Call) -> str:
    """The HTML of the tree below `call`."""
    template = files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    return fill(template, call.name, {"/*DATA*/": script(report_data(call))})


def together(name: str, runs: Sequence[tuple[float, Call]]) -> Call:
    """A new call whose children are the calls of finished runs. `runs`: (start of a run in seconds, the run's
    call). The times in these calls are changed to count from the start of the first run."""
    root = Call("program", name)
    first = min(began for began, _ in runs)
    for began, call in runs:
        for one in call.walk():
            one.shift(began - first)
        call.parent = root
        root.children.append(call)
    root.end_s = max(call.end_s or call.start_s for call in root.children)
    return root


def report_data(root: Call) -> dict[str, Any]:
    """The data of the report. A prompt is a list of indices into ``texts``, because prompts have most of
    their pieces in common."""
    misses = Misses(root)
    numbers: dict[int, int] = {}
    texts: list[str] = []
    known = token_texts(root)
    numbered = {call: number for number, call in enumerate(root.walk())}

    def number_of(piece: Piece) -> int:
        found = numbers.setdefault(id(piece), len(texts))
        if found == len(texts):
            texts.append(piece.text)
        return found

    def data_of(call: Call) -> dict[str, Any]:
        usage, miss, cached = call.usage, misses.why.get(call), misses.cached.get(call)
        data: dict[str, Any] = {
            "kind": call.kind,
            "name": call.name,
            "line": call.line,
            "model": call.model,
            "start": call.start_s,
            "end": call.end_s,
            "first": call.first_text_s,
            "phases": call.phases,
            "prompt_tokens": usage.prompt_tokens,
            "cached": usage.cached_tokens,
            "out": usage.completion_tokens,
            "forced": usage.forced_tokens,
            "requests": call.requests,
            "arguments": call.arguments,
            "failures": [asdict(failure) for failure in call.failures],
            "stored": usage.stored_tokens,
            "text": call.text,
            "finish": None if call.finish is None else call.finish.reason,
            "error": call.error,
            "prompt": [number_of(piece) for piece in pieces(call.prompt_end)],
            "children": [data_of(child) for child in call.children],
        }
        if call.tokens is not None:
            spans = call.tokens.spans(call.output, known[call.model])
            data["spans"] = [_span(span) for span in _answer(spans, call)]
        if call.thinking is not None:
            data["thinking"], data["thought"] = call.thinking, usage.reasoning_tokens
        if call.scores is not None:
            data["scores"] = [list(score) for score in scores_of(call.scores)]
        if call.choices:
            data["choices"] = [
                [text, [list(score) for score in scores_of(found.tokens)]] for text, found in call.choices
            ]
        if call.decisions:
            data["merged"] = call.merged
            data["decisions"] = [
                [
                    *(field, one.text, one.confidence, one.option_mass, one.layout),
                    list(zip(one.texts, one.probabilities.values(), strict=True)),
                    written(question, one.layout) or question.instructions,
                ]
                for (field, one), question in zip(call.decisions, call.questions, strict=True)
            ]
        if call.kind == "recover":
            lost = call.dropped_usage
            # A report of the recover alone has none of them.
            data["dropped"] = [numbered[one] for one in call.dropped if one in numbered]
            data["lost"] = [lost.prompt_tokens - lost.cached_tokens, lost.completion_tokens]
        if cached is not None:
            data["cached_chars"], data["exact"] = cached.chars, cached.exact
        if miss is not None:
            near = None if miss.nearest is None else numbered[miss.nearest]
            data["miss"] = {**miss.to_dict(), "nearest_number": near}
        return data

    models = {
        model: [usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens]
        for model, usage in root.usage_by_model.items()
    }
    return {"root": data_of(root), "texts": texts, "models": models if len(models) > 1 else {}}


def _answer(spans: Iterator[Span], call: Call) -> Iterator[Span]:
    left = len(call.before)
    for span in spans:
        if left < len(span.text) or (not left and not span.text):
            yield replace(span, text=span.text[left:])
        left = max(0, left - len(span.text))


def _span(span: Span) -> list[Any]:
    return [span.text, list(span.ids), span.forced, span.logprob, [list(entry) for entry in span.top]]
