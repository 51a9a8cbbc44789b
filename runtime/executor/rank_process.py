"""The process of a rank other than the first: it runs the passes that the scheduler's process sends.

The argument is the number of the rank. This rank has no head, so it computes no logits and samples nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from ramify.engine_messages import Ready
from ramify.runtime.cores import usable_cores
from ramify.runtime.executor.batch import Pass, batch_of
from ramify.runtime.executor.build import build_runners
from ramify.runtime.executor.load import loader
from ramify.runtime.executor.runner import Runner
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.loading.load import read_shape
from ramify.runtime.model.shape.context import with_context
from ramify.runtime.parallel.checks import check_ranks, part_for
from ramify.runtime.parallel.ranks import Ranks
from ramify.runtime.processes.ipc import Inbox, Outbox, Sockets
from ramify.runtime.processes.worker_process import reporting_start_up, take_orders
from ramify.runtime.processes.worker_start import finish_startup


def main() -> None:
    index = int(sys.argv[1])
    role = f"rank-{index}"
    orders = take_orders(role)
    config = orders.config
    sockets = Sockets(Path(orders.sockets))
    inbox: Inbox[Pass] = Inbox(sockets.rank(index), Pass)
    frontend = Outbox(sockets.frontend)
    torch.set_num_threads(config.threads or len(usable_cores()))
    torch.set_grad_enabled(False)
    with reporting_start_up(role, frontend):
        files = ModelFiles(orders.model_name, Path(orders.weights), Path(orders.tokenizer))
        shape = read_shape(files.weights, config.model_impl, config.rope_scaling)
        check_ranks(config, shape, files.weights)
        ranks = Ranks(index, config.tensor_parallel, sockets)
        context_length = with_context(shape, config.context_length).context_length
        load = loader(config, files, part_for(shape, ranks.index, ranks.count), context_length)
        runner, _ = build_runners(config, load, None, ranks)
    frontend.send(Ready(role=role, pid=os.getpid()))
    finish_startup()
    serve(runner, ranks, inbox)


def serve(runner: Runner, ranks: Ranks, inbox: Inbox[Pass]) -> None:
    """Run every pass. An error ends the process, and with it the engine core."""
    while True:
        message = inbox.recv()
        assert message is not None
        ids = None
        if message.ahead:
            ids = torch.empty(len(message.tokens) // 24, dtype=torch.int64, device=runner.device)
            ids = ranks.group.from_first(ids)
        runner.forward(batch_of(message, ids))
