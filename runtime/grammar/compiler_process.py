"""The grammar compiler as a process: ``python -m ramify.runtime.grammar.compiler_process``.

Arguments: the socket to listen on, the width of the model's logits, and the stop token ids with commas.
It compiles nothing itself: it forks a child for every job that no file on disk answers.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path

from ramify.messages import CompileGrammar, GrammarReady
from ramify.runtime.grammar.compile_jobs import Answer, CompileJobs
from ramify.runtime.grammar.compiler import answer, limit_memory
from ramify.runtime.grammar.grammar_files import GrammarFiles
from ramify.runtime.grammar.policy import prepare, prepare_xgrammar
from ramify.runtime.grammar.vocabulary import Vocabulary, load_vocabulary
from ramify.runtime.ipc import Inbox, Outbox, Sockets
from ramify.runtime.worker_process import Orders, take_orders


async def serve(
    inbox: Inbox[CompileGrammar], scheduler: Outbox, vocabulary: Vocabulary, orders: Orders
) -> None:
    """Answer the jobs of `inbox` for ever."""
    config = orders.config
    files = GrammarFiles(vocabulary)
    compiling: dict[str, CompileGrammar] = {}

    prepared = False

    def done(outcome: Answer) -> None:
        nonlocal prepared
        job = compiling.pop(outcome.key)
        scheduler.send(outcome)
        if isinstance(outcome, GrammarReady):
            files.put(job, outcome)
            if outcome.engine == "xgrammar" and not prepared:
                prepared = True  # children are forked with the library loaded from now on: 2 s less for each
                prepare_xgrammar(vocabulary)

    jobs = CompileJobs(
        lambda job: answer(job, vocabulary),
        done,
        timeout_s=config.grammar_timeout_s,
        enter=lambda: limit_memory(int(config.grammar_memory_gb * 2**30)),
    )

    def take(job: CompileGrammar) -> None:
        known = files.get(job)
        if known is not None:
            scheduler.send(known)
        else:
            compiling[job.key] = job
            jobs.submit(job)

    inbox.attach(asyncio.get_running_loop(), take)
    await asyncio.Event().wait()


def main() -> None:
    # Its parent is the scheduler, which may live on without it.
    orders = take_orders("compiler", remove_sockets=False)
    path, vocab_size, stop_ids = sys.argv[1:]
    inbox: Inbox[CompileGrammar] = Inbox(Path(path), CompileGrammar)
    scheduler = Outbox(Sockets(Path(orders.sockets)).scheduler)
    vocabulary = load_vocabulary(
        Path(orders.tokenizer), vocab_size=int(vocab_size), stop_ids=map(int, stop_ids.split(","))
    )
    prepare(vocabulary)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that it shares with this process
    asyncio.run(serve(inbox, scheduler, vocabulary, orders))


if __name__ == "__main__":
    main()
