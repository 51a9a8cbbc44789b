"""Writes grammar/compile/backend_keywords.json: the treatment of each keyword by other grammar libraries.

``python docs/backend_keywords.py [BACKEND…]`` runs them on the tests' schemas, which takes a few minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from ramify.grammar.compile.foreign import library_of  # noqa: E402
from ramify.grammar.compile.keywords import FILE, PACKAGES, table  # noqa: E402
from tests.grammar.backend_trials import answer, found, questions  # noqa: E402

if __name__ == "__main__":
    known = dict(table())
    asked = list(questions())
    for backend in sys.argv[1:] or PACKAGES:
        library_of(backend)  # imported once, not in each subprocess
        known[backend] = found(backend, asked, [answer(backend, question) for question in asked])
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(known, order="sorted"), indent=1) + b"\n")
