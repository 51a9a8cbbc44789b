"""Every answer under a published schema is valid, streamed or not, with the least tokens and with more.

The model has random weights: it wanders further than a trained one. `benchmarks.whole_answers` asks for 500.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.end_to_end.served import serve
from tests.end_to_end.whole_answers import FACTORS, ask_all
from tests.grammar.collection.cases import real_world
from tests.runtime.tiny import write_model, write_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

STYLES = {"function tools", "webpack options", "eslint rules", "kubernetes", "openapi", "command options"}


def test_answers_beside_other_requests_are_whole(tmp_path: Path) -> None:
    write_model(tmp_path, context_length=4096)
    write_tokenizer(tmp_path)
    cases = [case for case in real_world() if case.style in STYLES][::14]
    with serve("--model", str(tmp_path)) as served:
        found = asyncio.run(ask_all(served.url, cases, beside=6, seed=0))
    assert [each for each in found if each.fault not in ("", "refused")] == []
    # for each factor one answer streamed and one not; at most one schema of these is refused
    assert sum(not each.fault for each in found) >= (len(cases) - 1) * 2 * len(FACTORS)
    assert len(cases) >= 18
