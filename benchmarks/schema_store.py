"""How many of the schemas in a folder are enforced, and why the others are refused.

``python -m benchmarks.schema_store DIR [--definitions] [--sample 200] [--limit 5] [--save FILE]``, where DIR
holds the schemas of the JSON Schema Store (``src/schemas/json`` of github.com/SchemaStore/schemastore) or any
others. With ``--definitions`` they may refer to each other.
Each schema is compiled in a process of its own, with the default model's vocabulary and a server's limits of
memory and processor time. Refusals are counted by their message, with its numbers and names left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import time
from collections import Counter, defaultdict
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from ramify import constraint
from ramify.engine_messages import CompileGrammar, GrammarFailed
from ramify.errors import RamifyError
from ramify.grammar.compile.job import answer, limit_memory
from ramify.grammar.compile.policy import prepare
from ramify.grammar.vocabulary import Vocabulary
from ramify.runtime.config import DEFAULT_MODEL, EngineConfig
from ramify.runtime.model.hub.resolve import resolve
from ramify.runtime.model.tokenizer.vocabulary import load_vocabulary
from ramify.schema_bundle import Find, finder

LIMITS = EngineConfig()


class Outcome(NamedTuple):
    name: str
    message: str | None
    """Why the schema is refused; None where it is enforced."""
    pointer: str | None
    remedy: str | None
    seconds: float
    """Processor time."""

    @property
    def reason(self) -> str:
        return "enforced" if self.message is None else _reason(self.message)


def _reason(message: str) -> str:
    """The message without what differs from schema to schema."""
    message = re.sub(r"^At \S+: ", "", message)
    message = re.sub(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", "'…'", message)
    message = re.sub(r"(, to )?https?:\S+", "", message)
    message = re.sub(r"\(position \d+ of the pattern\)", "", message)
    return re.sub(r"\d+", "N", message)[:150]


def outcome(file: Path, vocabulary: Vocabulary, limit_s: float, find: Find | None) -> Outcome:
    """Compile the schema of `file` in a child process that may be killed."""
    reading, writing = os.pipe()
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = os.fork()
    if child == 0:
        try:
            limit_memory(int(LIMITS.grammar_memory_gb * 2**30))
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + limit_s) + 1,) * 2)
            os.write(writing, msgspec.json.encode(_compiled(file, vocabulary, find))[:60_000])
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        received = pipe.read()
    os.waitpid(child, 0)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime - began.ru_utime - began.ru_stime
    if not received:
        over = seconds > limit_s
        said = (f"It took more than {limit_s:g} s to compile.", "The compiler died.")[not over]
        return Outcome(file.name, said, None, None, seconds)
    message, pointer, remedy = msgspec.json.decode(received)
    return Outcome(file.name, message, pointer, remedy, seconds)


def _compiled(
    file: Path, vocabulary: Vocabulary, find: Find | None
) -> tuple[str | None, str | None, str | None]:
    try:
        made = constraint.json_schema(file.read_text("utf-8-sig"))
        if find is not None:
            made = constraint.with_definitions(made, find)
    except (RamifyError, UnicodeDecodeError) as error:
        return str(error), None, None
    found = answer(CompileGrammar(key=made.key, constraint=made), vocabulary, "ramify")
    if isinstance(found, GrammarFailed):
        return found.error.message, found.error.pointer, found.error.remedy
    return None, None, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--definitions", action="store_true", help="resolve references to the same folder")
    parser.add_argument("--sample", type=int, help="a number of schemas, chosen by a fixed seed")
    parser.add_argument("--only", type=Path, help="only the files that this text file names, one a line")
    parser.add_argument("--limit", type=float, default=LIMITS.grammar_timeout_s, help="seconds a schema")
    parser.add_argument("--save", type=Path, help="write every outcome to this file, as JSON lines")
    arguments = parser.parse_args()
    files = sorted(arguments.folder.rglob("*.json"))
    if arguments.only:
        wanted = set(arguments.only.read_text().split())
        files = [file for file in files if file.name in wanted]
    if arguments.sample:
        files = Random(0).sample(files, min(arguments.sample, len(files)))
    vocabulary = load_vocabulary(resolve(DEFAULT_MODEL).tokenizer, vocab_size=49_152, stop_ids=[2])
    prepare(vocabulary)
    find = finder(arguments.folder) if arguments.definitions else None
    found = []
    for file in files:
        found.append(outcome(file, vocabulary, arguments.limit, find))
        if arguments.save:
            with arguments.save.open("a", encoding="utf-8") as saved:
                saved.write(json.dumps({**found[-1]._asdict(), "reason": found[-1].reason}) + "\n")
    examples = defaultdict(list)
    for each in found:
        examples[each.reason].append(each.name)
    for reason, count in Counter(each.reason for each in found).most_common():
        print(f"{count:5} {count / len(found):6.1%}  {reason}  ({', '.join(examples[reason][:2])})")


if __name__ == "__main__":
    main()
