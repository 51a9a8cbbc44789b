"""A load test as one HTML page with plots that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from ramify.bench.plan import COMPARED, Plan, Series, ratios
from ramify.bench.svg import Axis, Line, chart, shares
from ramify.bench.table import COLUMNS, HEADS
from ramify.pages.page import fill

escape = html.escape


def page(series: Sequence[Series], plan: Plan) -> str:
    """The page of a plan that was carried out."""
    template = files(__package__).joinpath("bench_page.html").read_text(encoding="utf-8")
    names = [endpoint.name for endpoint in plan.endpoints]
    title = " against ".join(names)
    labels = list(dict.fromkeys(one.workload for one in series))
    sections = [_overview(series, names), _ratios(series)]
    for label in labels:
        sections.append(_workload(label, [one for one in series if one.workload == label], names))
    return fill(
        template,
        title,
        {"<!--FACTS-->": _facts(plan), "<!--LEGEND-->": _legend(names), "<!--BODY-->": "".join(sections)},
    )


def _facts(plan: Plan) -> str:
    facts = [
        f"{'' if endpoint.name in endpoint.url else endpoint.name + ': '}{endpoint.model} at {endpoint.url}"
        for endpoint in plan.endpoints
    ]
    facts.append(f"{plan.runs} run{'s' if plan.runs > 1 else ''} each, seed {plan.seed}")
    if plan.bounds:
        bounds = ", ".join(f"{name} {1000 * limit:g} ms" for name, limit in plan.bounds.items())
        facts.append(f"goodput counts requests within {bounds}")
    return "<br>".join(map(escape, facts))


def _legend(names: Sequence[str]) -> str:
    if len(names) == 1:
        return ""
    return "".join(f'<span><i class="b{index}"></i>{escape(name)}</span>' for index, name in enumerate(names))


def _overview(series: Sequence[Series], names: Sequence[str]) -> str:
    """All figures as a table; medians over the runs."""
    lines = [one.median for one in series]
    columns = [column for column in COLUMNS if any(column[1](line) for line in lines)]
    rated = any(one.rate is not None for one in series)
    head = ["workload", *(["endpoint"] if len(names) > 1 else []), *(["rate"] if rated else [])]
    rows = []
    for one, line in zip(series, lines, strict=True):
        start = [one.workload, *([one.endpoint] if len(names) > 1 else [])]
        start += [f"{one.rate:g}/s" if one.rate is not None else ""] if rated else []
        rows.append([*start, *(show(line) for _, show in columns)])
    note = (
        "Times in milliseconds, medians over the runs. TTFT: to the first text. ITL: between pieces of text."
    )
    return _panel(
        "All figures", _table([*head, *(name for name, _ in columns)], rows, len(head)) + _note(note)
    )


def _ratios(series: Sequence[Series]) -> str:
    compared = ratios(series)
    if not compared:
        return ""
    rated = any(line["rate"] is not None for line in compared)
    names = [name for name in COMPARED if any(name in line for line in compared)]
    rows = [
        [
            line["workload"],
            *([f"{line['rate']:g}/s" if line["rate"] is not None else ""] if rated else []),
            *(f"{line[name]:.2f}x" if name in line else "" for name in names),
        ]
        for line in compared
    ]
    head = ["workload", *(["rate"] if rated else []), *(HEADS[name] for name in names)]
    note = "Medians of the ratios of paired runs. Above 1x is better for rates, below 1x for times."
    return _panel(compared[0]["ratio"], _table(head, rows, 2 if rated else 1) + _note(note))


def _workload(label: str, series: Sequence[Series], names: Sequence[str]) -> str:
    rates = sorted({one.rate for one in series if one.rate is not None})
    charts, place = [], ""
    if len(rates) > 1:
        charts += _sweep(series, names)
        # The distributions of the highest rate alone: those of all would cover each other.
        series = [one for one in series if one.rate == rates[-1]]
        place = f", at {rates[-1]:g} requests/s"
    else:
        charts.append(_bars(series, names))
    for title, field in (
        ("Time to first text", "ttft_s"),
        ("Between pieces of text", "itl_s"),
        ("Whole request", "e2e_s"),
    ):
        lines = [
            Line(one.endpoint, [(1000 * value, 100 * share) for value, share in shares(values)], index)
            for one in series
            if (values := getattr(one, field))
            for index in [names.index(one.endpoint)]
        ]
        drawn = chart(lines, Axis("milliseconds", log=True), Axis("% of all", zero=True), title)
        charts.append(_figure(title + place, drawn))
    return _panel(label, f'<div class="charts">{"".join(charts)}</div>')


def _sweep(series: Sequence[Series], names: Sequence[str]) -> list[str]:
    """What each rate of arrivals does to latency and throughput."""

    def lines(value: Callable[[Mapping[str, Any]], float | None], label: str, dashed: bool) -> list[Line]:
        found = []
        for index, name in enumerate(names):
            points = [
                (one.rate, measured)
                for one in series
                if one.endpoint == name
                and one.rate is not None
                and (measured := value(one.median)) is not None
            ]
            found.append(Line(f"{name} {label}", sorted(points), index, dashed, marks=True))
        return found

    def rank(field: str, name: str) -> Callable[[Mapping[str, Any]], float | None]:
        return lambda line: None if line.get(field) is None else 1000 * line[field][name]

    rate = Axis("requests/s offered", zero=True)
    charts = []
    for title, field in (("Time to first text", "ttft_s"), ("Between pieces of text", "itl_s")):
        both = lines(rank(field, "p50"), "p50", False) + lines(rank(field, "p99"), "p99", True)
        drawn = chart(both, rate, Axis("milliseconds", log=True), title)
        charts.append(_figure(f"{title}: p50 and, dashed, p99", drawn))
    done = lines(lambda line: line["requests_per_s"], "finished", False)
    good = lines(lambda line: line.get("goodput_per_s"), "within bounds", True)
    title = "Requests finished" + (" and, dashed, within bounds" if any(one.points for one in good) else "")
    charts.append(_figure(title, chart(done + good, rate, Axis("requests/s", zero=True), title)))
    return charts


def _bars(series: Sequence[Series], names: Sequence[str]) -> str:
    """Output tokens per second: a bar for the median, a mark for each run."""
    runs = [[run["output_tokens_per_s"] for run in one.runs] for one in series]
    most = max((value for values in runs for value in values), default=0.0) or 1.0
    rows = []
    for one, values in zip(series, runs, strict=True):
        middle = one.median["output_tokens_per_s"]
        name = escape(one.endpoint) if len(names) > 1 else ""
        marks = "".join(f'<u style="left:{100 * value / most:.2f}%"></u>' for value in values)
        bar = f'<b class="b{names.index(one.endpoint)}" style="width:{100 * middle / most:.2f}%"></b>'
        rows.append(
            f'<div class="bar"><span>{name}</span><div>{bar}{marks}</div><em>{middle:,.1f}</em></div>'
        )
    return _figure("Output tokens per second", f'<div class="bars">{"".join(rows)}</div>')


def _figure(title: str, drawn: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawn}</figure>" if drawn else ""


def _panel(title: str, content: str) -> str:
    return f'<section class="panel"><h2>{escape(title)}</h2>{content}</section>'


def _note(text: str) -> str:
    return f'<p class="sub small">{escape(text)}</p>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=left' if index < left else ''}>{escape(cell)}</{tag}>"
            for index, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table class="num"><tr>{cells(head, "th")}</tr>{body}</table></div>'
