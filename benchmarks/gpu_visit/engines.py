"""Whole engines over dummy weights for the parts of a visit, in Llama-3.1-8B's shape or in a tiny one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.engine import CONFIGS, Row, Sizes, decodes, engine_config
from benchmarks.engine_local import LocalEngine
from benchmarks.gpu_visit.figures import Figures

TINY = Sizes(batches=(1, 2), context=20, steps=1, prompt=24, chunk=16, branches=2, prefixes=(128,))


def shape_of(figures: Figures) -> Path:
    return Path(__file__).with_name("tiny.json") if figures.tiny else CONFIGS / "llama-3.1-8b.json"


def build(
    figures: Figures, case: str, sizes: Sizes, *, context_length: int | None = None, **changes: Any
) -> LocalEngine:
    """An engine for `sizes`. Adds a row about its start to `figures`.

    In a rehearsal its kernels run in Triton's interpreter, in float32 and with pages of 16.
    """
    if figures.tiny:
        changes = {"attention_backend": "triton", "dtype": "float32", "page_size": 16, **changes}
    config = engine_config(sizes, "cpu" if figures.tiny else "cuda", **changes)
    if context_length is not None:
        config = dataclasses.replace(config, context_length=context_length)
    engine = LocalEngine(shape_of(figures), config)
    add_state(figures, f"{case}: built", engine)
    return engine


def add_state(figures: Figures, case: str, engine: LocalEngine) -> None:
    """Add a row with the counts of kernels compiled and graphs captured until now, and the memory in use."""
    facts = engine.facts()
    compiled, captured = facts["compiled"], facts["captured"]
    figures.add(
        case,
        build_s=facts["build_s"],
        kernels_compiled=compiled["kernels"],
        kernels_loaded=compiled["loaded"],
        jit_s=compiled["seconds"],
        graphs=captured["graphs"],
        capture_s=captured["seconds"],
        **{f"{name}_bytes": size for name, size in facts["memory"].items()},
    )


def add_row(figures: Figures, row: Row, *, of: str = "") -> None:
    """Add a row of `benchmarks.engine`, with its roofline as `floor_s` and `of` before the case's name."""
    row = dict(row)
    case = row.pop("case")
    if "of_roofline" in row:
        row["floor_s"] = row["of_roofline"] * row["seconds"]
    figures.add(f"{of}{case}", **row)


def add_decodes(
    figures: Figures, engine: LocalEngine, sizes: Sizes, bandwidth: float, *, of: str = ""
) -> list[Row]:
    """Add a row for each batch size, and go on after a failure. Returns the rows of `benchmarks.engine`."""
    rows: list[Row] = []
    for batch in sizes.batches:
        with figures.attempt(f"{of}decode {batch} x {sizes.context}"):
            for row in decodes(engine, dataclasses.replace(sizes, batches=(batch,)), bandwidth):
                add_row(figures, row, of=of)
                rows.append(row)
    return rows
