"""Keywords that a grammar leaves out, and violations of the output, are in a program's ``meta_info``."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

import ramify as rm
from ramify.messages import Enforcement, Generate, TextChunk, Unenforced, Violation
from tests.lang.steps import program_of

LEFT_OUT = Unenforced(schema="/pattern", message="left out")
VIOLATED = Violation(instance="", schema="/pattern", message="no match")


class Telling(rm.ScriptedBackend):
    """A backend that reports the same about its grammars as XGrammar does."""

    async def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        told: Enforcement | None = Enforcement(
            backend="xgrammar", unenforced=(LEFT_OUT,), narrowed=("less",), whole=False
        )
        async for chunk in super().generate(request):
            violations = None if chunk.finish is None else (VIOLATED,)
            yield msgspec.structs.replace(chunk, enforcement=told, violations=violations)
            told = None


def test_meta_info_tells_of_the_grammar() -> None:
    program = program_of("x" + rm.gen("a", max_tokens=4))
    meta = program.run(backend=Telling({"a": "one two"})).get_meta_info("a")
    assert (meta["unenforced"], meta["violations"]) == ([LEFT_OUT], [VIOLATED])
    assert (meta["grammar_backend"], meta["narrowed"], meta["may_be_cut"]) == ("xgrammar", ["less"], True)
