"""The benchmark of the ten programs: sums compare the same programs, and what decides in Python is known."""

from __future__ import annotations

import pytest

from benchmarks.programs import Done, decides, totals
from tests.lang.programs import CASES


def test_totals_are_over_the_programs_that_ran(capsys: pytest.CaptureFixture[str]) -> None:
    totals(
        [
            {"process": Done(2.0), "process-graph": Done(1.0), "client": Done(4.0)},
            {"process": Done(8.0), "client": Done(6.0)},
        ]
    )
    process, compiled, client = (text.split() for text in capsys.readouterr().out.splitlines())
    assert process[:4] == ["all", "process", "10.00", "1.00x"]
    assert compiled[:6] == ["1", "of", "them", "process-graph", "1.00", "4.00x"]
    assert client[:4] == ["all", "client", "10.00", "1.00x"]


def test_which_programs_have_a_whole_graph() -> None:
    whole = {name for name, case in CASES.items() if not decides(case)}
    assert whole == {"few-shot", "skeleton-of-thought", "map-reduce", "multi-turn-chat", "streaming"}
