"""The report of a load test: one HTML file with tables and plots (matplotlib, as inline SVG)."""

from __future__ import annotations

import functools
import html
import importlib.util
import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ramify.bench.plan import Plan, Series
from ramify.bench.table import Table, figures_table, ratios_table
from ramify.errors import InvalidRequest
from ramify.html.template import fill

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIMES = (("Time to first text", "ttft_s"), ("Between pieces of text", "itl_s"), ("Whole request", "e2e_s"))
PERCENT = range(101)
TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title><!--TITLE--> · Ramify bench</title>
<style>
/*include style.css*/
main { display: grid; gap: 16px; padding: 8px 24px 32px; }
section { padding: 16px 18px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: right; padding: 5px 9px; border-bottom: 1px solid var(--line); white-space: nowrap; }
.left { text-align: left; }
svg { display: block; max-width: 100%; height: auto; }
</style>
</head>
<body>
<header class="top"><h1><!--TITLE--></h1></header>
<main><!--BODY--></main>
</body>
</html>
"""


def check_matplotlib() -> None:
    """Raise `InvalidRequest` if matplotlib, which draws the plots, is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidRequest(
            "--html draws plots with matplotlib, which is not installed.",
            field="html",
            remedy="pip install 'ramify-llm[bench]', or write --jsonl instead.",
        )


def report(series: Sequence[Series], plan: Plan) -> str:
    """The text of the HTML file with the results `series` of `plan`."""
    names = [endpoint.name for endpoint in plan.endpoints]
    facts = [f"{endpoint.name}: {endpoint.model} at {endpoint.address}" for endpoint in plan.endpoints]
    facts.append(f"{plan.runs} run{'s' if plan.runs > 1 else ''} each, seed {plan.seed}")
    if plan.bounds:
        bounds = ", ".join(f"{name} {1000 * limit:g} ms" for name, limit in plan.bounds.items())
        facts.append(f"goodput counts requests within {bounds}")
    sections = [
        f'<p class="sub">{"<br>".join(map(html.escape, facts))}</p>',
        _section("All figures", _table(figures_table(series)), "Times in milliseconds, medians of the runs."),
    ]
    if (compared := ratios_table(series)) is not None:
        note = "Medians of the ratios of paired runs. Above 1x is better for rates, below 1x for times."
        sections.append(_section(" / ".join(names), _table(compared), note))
    for label in dict.fromkeys(one.workload for one in series):
        drawn = _plots([one for one in series if one.workload == label], names)
        sections.append(_section(label, drawn))
    return fill(TEMPLATE, " against ".join(names), {"<!--BODY-->": "".join(sections)})


def _section(title: str, content: str, note: str = "") -> str:
    return f'<section class="panel"><h2>{html.escape(title)}</h2>{content}<p class="sub">{note}</p></section>'


def _table(table: Table) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=left' if index < table.left else ''}>{html.escape(cell)}</{tag}>"
            for index, cell in enumerate(row)
        )

    head, *rows = table.rows
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<table class="num"><tr>{cells(head, "th")}</tr>{body}</table>'


def _plots(series: Sequence[Series], names: Sequence[str]) -> str:
    """An SVG element with plots: the throughput, or with several rates the figures at each rate; then
    distributions of latencies.

    With several rates only the distributions at the highest rate are shown, as those of all rates would cover
    each other.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rates = sorted({one.rate for one in series if one.rate is not None})
    shown, place = series, ""
    with matplotlib.rc_context({"svg.fonttype": "none", "axes.grid": True, "grid.alpha": 0.3}):
        if len(rates) > 1:
            figure = Figure(figsize=(15, 8), layout="constrained")
            axes = list(figure.subplots(2, 3).flat)
            _draw_rates(axes, series, names)
            shown = [one for one in series if one.rate == rates[-1]]
            place = f", at {rates[-1]:g} requests/s"
        else:
            figure = Figure(figsize=(18, 4), layout="constrained")
            axes = list(figure.subplots(1, 4))
            _draw_throughput(axes[0], series, names)
        for panel, (title, field) in zip(axes[-3:], TIMES, strict=True):
            _draw_distribution(panel, shown, names, field)
            panel.set(title=title + place, xlabel="milliseconds", ylabel="% of all")
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue().partition("<svg ")[2].join(("<svg ", ""))


def _draw_throughput(axes: Axes, series: Sequence[Series], names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        for one in (one for one in series if one.endpoint == name):
            axes.barh(name, one.median["output_tokens_per_s"], color=f"C{index}")
            runs = [run["output_tokens_per_s"] for run in one.runs]
            axes.plot(runs, [name] * len(runs), "k|", markersize=12)
    axes.set(title="Throughput", xlabel="output tokens/s")


def _draw_rates(axes: Sequence[Axes], series: Sequence[Series], names: Sequence[str]) -> None:
    for panel, (title, field) in zip(axes[:2], TIMES, strict=False):
        for rank, style in (("p50", "-"), ("p99", "--")):
            _draw_line(panel, series, names, rank, style, functools.partial(_milliseconds, field, rank))
        panel.set(title=title, ylabel="milliseconds")
    _draw_line(axes[2], series, names, "finished", "-", lambda line: line["requests_per_s"])
    if "goodput_per_s" in series[0].median:
        _draw_line(axes[2], series, names, "within bounds", "--", lambda line: line["goodput_per_s"])
    axes[2].set(title="Requests", ylabel="requests/s")
    for panel in axes[:3]:
        panel.set_xlabel("requests/s offered")
        panel.legend()


def _draw_line(
    axes: Axes,
    series: Sequence[Series],
    names: Sequence[str],
    label: str,
    style: str,
    value: Callable[[dict[str, Any]], float],
) -> None:
    for index, name in enumerate(names):
        lines = sorted((one.rate or 0.0, value(one.median)) for one in series if one.endpoint == name)
        axes.plot(*zip(*lines, strict=True), style, marker="o", color=f"C{index}", label=f"{name} {label}")


def _milliseconds(field: str, rank: str, line: dict[str, Any]) -> float:
    """The percentile `rank` of the latency `field`. NaN, which is not drawn, if no request succeeded."""
    return math.nan if line[field] is None else 1000 * line[field][rank]


def _draw_distribution(axes: Axes, series: Sequence[Series], names: Sequence[str], field: str) -> None:
    import numpy as np

    for one in series:
        values = getattr(one, field)
        if values:
            steps = 1000 * np.percentile(values, list(PERCENT))
            axes.plot(steps, PERCENT, color=f"C{names.index(one.endpoint)}", label=one.endpoint)
            if steps[-1] > 0:
                axes.set_xscale("log")
    if axes.lines:
        axes.legend()
