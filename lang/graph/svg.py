"""The drawing of a graph: nodes in layers, one column a branch, as SVG that needs nothing else."""

from __future__ import annotations

from collections import defaultdict
from html import escape
from typing import TYPE_CHECKING

from ramify.graph import Fork, Gen, Graph, Join, Select, Text

if TYPE_CHECKING:
    from ramify.lang.graph.view import GraphView

WIDTH, HEIGHT = 230, 34
"""Of a node, in pixels."""
GAP_X, GAP_Y = 34, 26
MARGIN = 20
MAX_LABEL = 29
"""Characters that fit into a node; its title has the rest."""

STYLE = """
svg { background: #fff; font: 12px ui-monospace, monospace; }
rect { fill: #f4f4f2; stroke: #b9b9b4; }
.call { fill: #e3edfb; stroke: #5b8bd0; }
.fork { fill: #fdf1dc; stroke: #d9a441; }
path { fill: none; stroke: #8a8a85; }
.data { stroke: #c0562f; stroke-dasharray: 5 4; }
"""


def drawing(view: GraphView) -> str:
    """The graph as an SVG document."""
    edges = list(view.edges())
    nodes = view.graph.nodes
    layers = [0] * len(nodes)
    for edge in edges:  # all edges lead to later nodes, and come in their order
        layers[edge.after] = max(layers[edge.after], layers[edge.before] + 1)
    columns = columns_of(view.graph)
    places = [
        (
            MARGIN + columns[node.branch] * (WIDTH + GAP_X),
            MARGIN + layer * (HEIGHT + GAP_Y),
        )
        for node, layer in zip(nodes, layers, strict=True)
    ]
    width = max(x for x, _ in places) + WIDTH + GAP_X + MARGIN
    height = max(y for _, y in places) + HEIGHT + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">',
        f"<title>{escape(view.graph.name)}</title><style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 8 4 0 8z" style="fill:#8a8a85;stroke:none"/></marker></defs>',
    ]
    parts += [_edge(places[edge.before], places[edge.after], edge.kind) for edge in edges]
    for place, (node, (x, y)) in enumerate(zip(nodes, places, strict=True)):
        label = view.label(place)
        shown = label if len(label) <= MAX_LABEL else label[: MAX_LABEL - 1] + "…"
        kind = "call" if isinstance(node, Gen | Select) else "fork" if isinstance(node, Fork | Join) else ""
        whole = "".join(map(str, node.parts)) if isinstance(node, Text) else label
        parts.append(
            f"<g><title>{escape(f'{place}: {whole}')}</title>"
            f'<rect class="{kind}" x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5"/>'
            f'<text x="{x + 9}" y="{y + 22}">{escape(shown)}</text></g>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def columns_of(graph: Graph) -> dict[int, int]:
    """The column of each branch: a parent's children stand right of it, where a joined fork's have stood."""
    columns = {0: 0}
    free: dict[int, list[int]] = defaultdict(list)
    """Columns that the branch in a column has had children in, and that are free again."""
    used = 1
    for node in graph.nodes:
        own = columns[node.branch]
        if isinstance(node, Fork):
            for child in node.children:
                if not free[own]:
                    free[own].append(used)
                    used += 1
                columns[child] = free[own].pop(0)
        elif isinstance(node, Join):
            free[own] = sorted([*free[own], *(columns[child] for child in node.children)])
    return columns


def _edge(start: tuple[int, int], end: tuple[int, int], kind: str) -> str:
    """A curve from the bottom of one node to the top of another; data goes from side to side."""
    if kind == "data":
        x1, y1, y2 = start[0] + WIDTH, start[1] + HEIGHT // 2, end[1] + HEIGHT // 2
        if end[0] > start[0]:
            path = f"M{x1} {y1}C{x1 + GAP_X} {y1} {end[0] - GAP_X} {y2} {end[0]} {y2}"
        else:
            x2, out = end[0] + WIDTH, x1 + GAP_X
            path = f"M{x1} {y1}C{out} {y1} {out} {y2} {x2} {y2}"
    else:
        (x1, y1), (x2, y2) = (start[0] + WIDTH // 2, start[1] + HEIGHT), (end[0] + WIDTH // 2, end[1])
        middle = (y1 + y2) // 2
        path = f"M{x1} {y1}C{x1} {middle} {x2} {middle} {x2} {y2 - 1}"
    return f'<path class="{kind}" marker-end="url(#tip)" d="{path}"/>'
