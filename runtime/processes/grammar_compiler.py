"""The grammar compiler's process.

Arguments: the socket to listen on, the width of the model's logits, and the stop token ids, separated by
commas. Each job runs in a child process. The scheduler asks for grammars that are not on disk, and this
process writes them to disk.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from ramify.engine_messages import CompileGrammar, DropGrammar, GrammarReady
from ramify.grammar.compile.child_jobs import Answer, CompileJobs, answer
from ramify.grammar.compile.child_limits import limit_memory
from ramify.grammar.compile.grammar_files import GrammarFiles
from ramify.grammar.compile.policy import prepare, warm
from ramify.grammar.engine.load import prepare_library
from ramify.grammar.vocabulary import Vocabulary
from ramify.runtime.model.tokenizer.tokenizer import load_vocabulary
from ramify.runtime.processes.ipc import Inbox, Outbox, Sockets
from ramify.runtime.processes.worker_process import Orders, take_orders
from ramify.runtime.processes.worker_start import finish_startup


async def serve(
    inbox: Inbox[CompileGrammar | DropGrammar], scheduler: Outbox, vocabulary: Vocabulary, orders: Orders
) -> None:
    """Answer the jobs of `inbox` until the process is killed."""
    config = orders.config
    files = GrammarFiles(vocabulary, backend=config.grammar_backend)

    def done(outcome: Answer) -> None:
        scheduler.send(outcome)
        if isinstance(outcome, GrammarReady):
            files.put(outcome)

    jobs = CompileJobs(
        lambda job: answer(job, vocabulary, config.grammar_backend, find=files.get),
        done,
        timeout_s=config.grammar_timeout_s,
        enter=lambda: limit_memory(int(config.grammar_memory_gb * 2**30)),
        warm=lambda: warm(vocabulary),
    )

    def handle(message: CompileGrammar | DropGrammar) -> None:
        if isinstance(message, DropGrammar):
            jobs.drop(message.key)
        else:
            jobs.submit(message)

    inbox.attach(asyncio.get_running_loop(), handle)
    await asyncio.Event().wait()


def main() -> None:
    # The parent is the scheduler, which may outlive this process and needs the sockets.
    orders = take_orders("compiler", remove_sockets=False)
    path, vocab_size, stop_ids = sys.argv[1:]
    inbox: Inbox[CompileGrammar | DropGrammar] = Inbox(Path(path), CompileGrammar | DropGrammar)
    scheduler = Outbox(Sockets(Path(orders.sockets)).scheduler)
    vocabulary = load_vocabulary(
        Path(orders.tokenizer), vocab_size=int(vocab_size), stop_ids=map(int, stop_ids.split(","))
    )
    prepare(vocabulary)
    prepare_library(orders.config.grammar_backend, vocabulary)
    finish_startup()
    asyncio.run(serve(inbox, scheduler, vocabulary, orders))
