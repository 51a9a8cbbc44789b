"""Parts of a visit whose cases fail: the others have their figures, and memory is given back."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from benchmarks.engine import Row, Sizes
from benchmarks.gpu_visit import engines
from benchmarks.gpu_visit.figures import Figures
from benchmarks.gpu_visit.parts import library


@pytest.fixture
def figures(tmp_path: Path) -> Figures:
    return Figures(tmp_path / "figures.jsonl", "part", tiny=True)


def failed(figures: Figures) -> dict[str, bool]:
    rows = map(json.loads, figures.path.read_text().splitlines())
    return {row["case"]: "error" in row for row in rows}


class Engine:
    """An engine that may be alive alone."""

    alive: ClassVar[weakref.WeakSet[Engine]] = weakref.WeakSet()

    def __init__(self) -> None:
        assert not self.alive
        self.alive.add(self)


def test_a_batch_that_fails_does_not_stop_the_next(figures: Figures, monkeypatch: pytest.MonkeyPatch) -> None:
    def decodes(engine: Any, sizes: Sizes, bandwidth: float) -> Iterator[Row]:
        for batch in sizes.batches:
            if batch == 1:
                raise RuntimeError("not all requests decode")
            yield {"case": f"decode {batch} x 8", "seconds": 0.5}

    monkeypatch.setattr(engines, "decodes", decodes)
    engine: Any = None
    sizes = Sizes(batches=(1, 32, 256), context=8)
    rows = engines.add_decodes(figures, engine, sizes, 1.0, of="ours: ")
    assert [row["case"] for row in rows] == ["decode 32 x 8", "decode 256 x 8"]
    assert failed(figures) == {f"ours: decode {batch} x 8": batch == 1 for batch in sizes.batches}


def test_our_engine_is_gone_before_the_library_s_step(
    figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object) -> Engine:
        return Engine()

    def fails(*_: object, **options: object) -> None:
        assert Engine.alive
        raise RuntimeError

    class Library:
        def __init__(self, *_: object) -> None:
            raise LookupError(f"{len(Engine.alive)} engines")

    monkeypatch.setattr(library, "build", build)
    monkeypatch.setattr(library, "ceilings", fails)
    monkeypatch.setattr(library, "Library", Library)
    with pytest.raises(LookupError, match="0 engines"):
        library.run(figures)
    assert failed(figures) == {"ours": True}


class Attention(library.Cached):
    """Rows that each backend computed; on `refuse`, all but the plain one raise."""

    def __init__(self, *, refuse: bool) -> None:
        self.example, self.refuse = torch.ones(256, 4), refuse
        self.plain_rows: list[int] = []

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        if torch.backends.cuda.math_sdp_enabled():
            self.plain_rows.append(len(qkv))
        elif self.refuse:
            raise RuntimeError("no such backend")
        return qkv


class Timer:
    def medians(
        self, calls: Mapping[str, Callable[[], object]], *, seconds: float
    ) -> tuple[dict[str, float], dict[str, str]]:
        for call in calls.values():
            call()
        return dict.fromkeys(calls, seconds), {}


@pytest.mark.parametrize("refuse", [False, True])
def test_plain_attention_computes_few_rows_unless_no_other_runs(refuse: bool) -> None:
    attention, timer = Attention(refuse=refuse), Timer()
    times, refused = library.backends(attention, timer)  # type: ignore[arg-type]
    others = {"flash", "efficient", "cudnn"}
    assert set(times) == ({"math"} if refuse else others)
    assert set(refused) == (others if refuse else set())
    assert attention.plain_rows == ([8, 256] if refuse else [8])
