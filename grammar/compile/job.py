"""A compile job: turns a constraint into a serialised grammar, or into the reason why it has none."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable
from pathlib import Path

from ramify.constraint import Constraint
from ramify.engine_messages import CompileGrammar, GrammarFailed, GrammarReady
from ramify.errors import InvalidConstraint, RamifyError
from ramify.grammar.compile.foreign import Compiled
from ramify.grammar.compile.policy import compile_constraint
from ramify.grammar.vocabulary import Vocabulary

log = logging.getLogger("ramify")

STATM = Path("/proc/self/statm")


def answer(
    job: CompileGrammar,
    vocabulary: Vocabulary,
    backend: str = "auto",
    compile_constraint: Callable[[Constraint, Vocabulary, str], Compiled] = compile_constraint,
) -> GrammarReady | GrammarFailed:
    """Compile one constraint by `compile_constraint`. Every exception becomes a `GrammarFailed`."""
    error: RamifyError
    try:
        compiled = compile_constraint(job.constraint, vocabulary, backend)
        return GrammarReady(key=job.key, **compiled._asdict())
    except RamifyError as refused:
        error = refused
    except MemoryError:
        error = InvalidConstraint(
            "The constraint takes more memory to compile than is allowed.",
            remedy="Simplify it: fewer or smaller repetitions, shorter enumerations.",
        )
    except RecursionError:
        error = InvalidConstraint(
            "The constraint is nested too deeply.", remedy="Put parts of it beside one another."
        )
    except Exception as unforeseen:
        log.exception("a constraint of kind %s cannot be compiled", job.constraint.kind)
        error = InvalidConstraint(
            f"The {job.constraint.kind} cannot be compiled: {unforeseen}.",
            remedy="This is a fault of Ramify's: please report it with the constraint.",
        )
    if error.field is None:
        error.field = job.constraint.kind
    return GrammarFailed(key=job.key, error=error.to_info())


def limit_memory(extra_bytes: int, statm: Path = STATM) -> None:
    """Let this process map at most `extra_bytes` more memory than it maps now (RLIMIT_AS). Does nothing on
    systems that do not report the mapped memory (all but Linux)."""
    if not statm.is_file():
        return
    mapped = int(statm.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + extra_bytes, resource.RLIM_INFINITY))
