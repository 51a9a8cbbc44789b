"""Ten programs of ten kinds: tests run each on every backend, benchmarks run them in batches.

All are greedy, so that every backend that runs the same model gives the same outputs.
"""

from __future__ import annotations

from tests.lang.programs.branching import JUDGE, SKELETON, SPECULATIVE, TREE
from tests.lang.programs.case import Case
from tests.lang.programs.chatting import CHAT, STORY
from tests.lang.programs.documents import FEW_SHOT, SUMMARY
from tests.lang.programs.structured import CHARACTER, REACT

CASES: dict[str, Case] = {
    case.name: case
    for case in (FEW_SHOT, TREE, REACT, JUDGE, SKELETON, SUMMARY, CHARACTER, CHAT, SPECULATIVE, STORY)
}

__all__ = ["CASES", "Case"]
