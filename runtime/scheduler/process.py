"""The scheduler process, which runs the model: no other process uses the device."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ramify.decisions.decider import DeciderConfig
from ramify.decisions.trained import trained
from ramify.engine_messages import CompilerDied, GetTree, GrammarReady, Ready, ToScheduler, Woken
from ramify.grammar.retokenize import Retokenizer, encode
from ramify.grammar.vocabulary import Vocabulary
from ramify.model_info import KvRoom, ModelInfo
from ramify.radix.cache import NaiveCache, PrefixCache
from ramify.radix.tree_log import TreeLog
from ramify.runtime.cold.open import open_stores
from ramify.runtime.compile_ahead import compile_grammars, grammars_are_compiled
from ramify.runtime.config import EngineConfig
from ramify.runtime.cores import usable_cores
from ramify.runtime.executor.build import build_runners
from ramify.runtime.executor.device import (
    check_attention,
    check_trials,
    resolve_device,
    resolve_dtype,
)
from ramify.runtime.executor.load import LoadDraft, loader, own_head_loader
from ramify.runtime.executor.memory import COW_PAGES, check_states, room_of, with_defaults_of
from ramify.runtime.executor.runner import Runner
from ramify.runtime.kv_transfer.identity import kv_identity, weights_digests
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.gguf.header import read_header
from ramify.runtime.model.loading.load import (
    BY_TRANSFORMERS,
    FAMILIES,
    check_transformers,
    read_shape,
)
from ramify.runtime.model.loading.sampling_defaults import sampling_defaults_of
from ramify.runtime.model.pooling import pooling_of
from ramify.runtime.model.shape.config import ModelConfig, ModelShape
from ramify.runtime.model.shape.context import context_notes, with_context
from ramify.runtime.model.shape.heads import HeadConfig
from ramify.runtime.model.tokenizer.end_tokens import with_end_tokens
from ramify.runtime.model.tokenizer.tokenizer import load_backend, load_vocabulary
from ramify.runtime.parallel.checks import check_ranks, part_for
from ramify.runtime.parallel.ranks import Ranks
from ramify.runtime.processes.ipc import Inbox, Outbox, Sockets
from ramify.runtime.processes.worker_process import (
    Orders,
    before_leaving,
    reporting_start_up,
    take_orders,
)
from ramify.runtime.processes.worker_start import finish_startup, trim_heap
from ramify.runtime.scheduler.control import KVEventPublisher
from ramify.runtime.scheduler.grammars import CompilerHost, GrammarStore
from ramify.runtime.scheduler.requests.constrained import Healer
from ramify.runtime.scheduler.requests.limits import Limits
from ramify.runtime.scheduler.residency import Residency
from ramify.runtime.scheduler.scheduler import Scheduler
from ramify.runtime.scheduler.speculation.checks import read_draft, speculates

if TYPE_CHECKING:
    from ramify.grammar.compile.grammar_files import GrammarFiles

log = logging.getLogger("ramify")

IDLE_S = 0.3
"""The compiler's process starts after IDLE_S seconds without work, so that requests queued at start-up go
first. The first constraint whose grammar is not on disk starts the process earlier."""
LEAVE_S = 4.0
"""Most seconds for writing to the cold tier before this process ends: its parent kills it after 5 s."""


def main() -> None:
    orders = take_orders("scheduler")
    config = orders.config
    sockets = Sockets(Path(orders.sockets))
    inbox: Inbox[ToScheduler] = Inbox(sockets.scheduler, ToScheduler)
    detokenizer, frontend = Outbox(sockets.detokenizer), Outbox(sockets.frontend)
    torch.set_num_threads(config.threads or len(usable_cores()))
    torch.set_grad_enabled(False)
    with reporting_start_up("scheduler", frontend):
        shape = read_shape(Path(orders.weights), config.model_impl, config.rope_scaling)
        if not isinstance(shape, ModelConfig):
            config = check_transformers(config)
            if shape.family in FAMILIES and shape.not_native:
                log.warning("%s %s", shape.not_native, BY_TRANSFORMERS)
        for note in context_notes(shape, config.context_length):
            log.warning(note)
        device = resolve_device(config)
        config = with_defaults_of(check_states(config, shape), device)
        config = dataclasses.replace(config, speculation=speculates(config, device.type))
        check_attention(config, shape, resolve_dtype(config, device))
        check_trials(config, device, shape)
        folder = Path(orders.tokenizer)
        shape, about_ends = with_end_tokens(shape, folder)
        if about_ends is not None:
            log.warning(about_ends)
        vocabulary = load_vocabulary(folder, vocab_size=shape.vocab_size, stop_ids=shape.eos_token_ids)
        files, draft_files = _files_of(config, orders)
        draft_shape = read_draft(config, shape, files, draft_files)
        if draft_shape is not None:
            if not isinstance(draft_shape, ModelConfig):
                check_transformers(config)
            check_attention(config, draft_shape, resolve_dtype(config, device))
        compiler = CompilerHost(orders, sockets, vocabulary)
        tokenizer = functools.cache(load_backend)
        # Done while the weights load: start-up takes 0.25 s longer, the first schema 0.45 s less.
        threading.Thread(
            target=_prepare_engines, args=(config, vocabulary, lambda: tokenizer(folder)), daemon=True
        ).start()
        if config.cold_dir is not None or config.replicas > 1:  # a second for each GB, at the first start
            threading.Thread(target=weights_digests, args=(config, Path(orders.weights)), daemon=True).start()
        runner, draft_runner, cache, limits = _load(config, orders, shape, draft_shape)
        if config.overlap is None:
            config = dataclasses.replace(config, overlap=runner.device.type == "cuda")
        grammars = GrammarStore(
            vocabulary,
            find=functools.partial(_find_grammar, vocabulary, config.grammar_backend),
            send=compiler.send,
            restart=compiler.restart,
        )
        identity = functools.cache(lambda: kv_identity(config, runner.pool, Path(orders.weights)))
        waker = Outbox(sockets.scheduler)
        retokenizer = Retokenizer(lambda text: encode(tokenizer(folder), text), vocabulary)
        scheduler = Scheduler(
            config,
            limits,
            runner,
            cache,
            grammars,
            detokenizer.send,
            retokenizer=retokenizer,
            healer=Healer(vocabulary),
            draft_runner=draft_runner,
            kv_identity=identity,
            cold=open_stores(config, runner.pool, identity, states=runner.states is not None),
            wake=lambda: waker.send(Woken()),  # by the cold tier's thread only
            residency=_residency(cache, runner, draft_runner),
        )
        left = threading.Event()
        if scheduler.cold is not None:
            _write_before_leaving(Outbox(sockets.scheduler), left)
    frontend.send(
        Ready(
            role="scheduler",
            pid=os.getpid(),
            model_info=_model_info(
                orders, config, runner, limits, _room(config, runner, draft_runner, limits.context_length)
            ),
            max_prompt_tokens=min(limits.context_length, limits.kv_tokens) - 1,
            page_bytes=scheduler.transfers.page_bytes,
        )
    )
    finish_startup()

    def prepare() -> None:
        if not compiler.generation:  # otherwise a constraint has started it already
            compiler.start()
        threading.Thread(target=_prepare_library, args=(config, vocabulary), daemon=True).start()

    publisher = None if cache.log is None else KVEventPublisher(cache.tree, cache.log, frontend.send)
    serve(scheduler, inbox, detokenizer, compiler, prepare, publisher, left)


def _write_before_leaving(outbox: Outbox, left: threading.Event) -> None:
    """When this process is to end, have the loop write to the cold tier what is not written yet."""

    def leave() -> None:
        outbox.send(Woken(leave=True))
        left.wait(LEAVE_S)

    before_leaving(leave)


def _find_grammar(vocabulary: Vocabulary, backend: str, key: str) -> GrammarReady | None:
    """The grammar of `key` from disk; None if no file has it, or while the grammar engine is compiled.

    Meanwhile the compiler's process waits for the engine. Here its import would stop the loop, and an engine
    core that is silent for 30 s is restarted.
    """
    return _grammar_files(vocabulary, backend).get(key) if grammars_are_compiled() else None


@functools.cache
def _grammar_files(vocabulary: Vocabulary, backend: str) -> GrammarFiles:
    from ramify.grammar.compile.grammar_files import GrammarFiles

    return GrammarFiles(vocabulary, backend=backend)


def _prepare_engines(
    config: EngineConfig, vocabulary: Vocabulary, load_tokenizer: Callable[[], object]
) -> None:
    """Load, in advance, the engine for the first constraint and the tokenizer for the first forced text."""
    compile_grammars()
    from ramify.grammar.engine.load import prepare

    prepare(vocabulary)
    if config.grammar_backend != "auto":  # with "auto" few constraints need another library
        _prepare_library(config, vocabulary)
    load_tokenizer()


def _prepare_library(config: EngineConfig, vocabulary: Vocabulary) -> None:
    from ramify.grammar.engine.load import prepare_library

    prepare_library(config.grammar_backend, vocabulary)
    trim_heap()


def serve(
    scheduler: Scheduler,
    inbox: Inbox[ToScheduler],
    detokenizer: Outbox,
    compiler: CompilerHost,
    prepare: Callable[[], None],
    publisher: KVEventPublisher | None,
    left: threading.Event,
) -> None:
    """Run the loop: receive, step, send. Blocks only while there is nothing to do.

    `prepare` is called once, when there has been nothing to do for `IDLE_S`. `publisher`, if any, sends the
    changes of the tree after each step. `left` is set when the cold tier has been closed.
    """
    prepared = False
    while True:
        messages = inbox.drain()
        if not messages and not scheduler.busy:
            message = inbox.recv(scheduler.wait_s if prepared else IDLE_S)
            messages = [] if message is None else [message]
            if message is None and not prepared:
                prepared = True
                prepare()
                continue
        for message in messages:
            if isinstance(message, CompilerDied):
                if message.generation == compiler.generation:
                    scheduler.compiler_died()
            elif isinstance(message, Woken) and message.leave:
                if scheduler.cold is not None:
                    scheduler.cold.close(LEAVE_S)
                left.set()
            elif isinstance(message, GetTree):
                if publisher is not None:
                    publisher.publish_whole()
            else:
                scheduler.receive(message)
        output = scheduler.step()
        if output is not None:
            detokenizer.send(output)
        if publisher is not None:
            publisher.publish_changes()


def _files_of(config: EngineConfig, orders: Orders) -> tuple[ModelFiles, ModelFiles | None]:
    """The files of the model, and those of the draft model."""
    files = ModelFiles(orders.model_name, Path(orders.weights), Path(orders.tokenizer))
    if orders.draft_weights is None:
        return files, None
    draft = Path(orders.draft_weights), Path(orders.draft_tokenizer or "")
    return files, ModelFiles(config.draft_model or "", *draft)


def _load(
    config: EngineConfig, orders: Orders, shape: ModelShape, draft_shape: ModelShape | None
) -> tuple[Runner, Runner | None, PrefixCache | NaiveCache, Limits]:
    context_length = with_context(shape, config.context_length).context_length
    files, draft_files = _files_of(config, orders)
    load_draft: LoadDraft | None = None
    ranks = None
    check_ranks(config, shape, files.weights)
    part = part_for(shape, 0, config.tensor_parallel)
    if config.tensor_parallel > 1:
        ranks = Ranks(0, config.tensor_parallel, Sockets(Path(orders.sockets)))
    if draft_shape is not None:
        of_draft = config
        if config.quantization == "gguf" and (draft_files or files).weights.is_dir():
            of_draft = dataclasses.replace(config, quantization="auto")
        if draft_files is not None:
            load_draft = loader(of_draft, draft_files, draft_shape, context_length)
        else:
            assert isinstance(draft_shape, HeadConfig)
            load_draft = own_head_loader(of_draft, files, draft_shape, context_length)
    load = loader(config, files, part, context_length)
    runner, draft_runner = build_runners(config, load, load_draft, ranks)
    num_pages = runner.pool.num_pages
    # With several replicas the frontend places requests by what their trees hold.
    tokens = config.kv_events is not None
    cache = (PrefixCache if config.prefix_cache == "radix" else NaiveCache)(
        num_pages,
        runner.pool.page_size,
        num_states=0 if runner.states is None else runner.states.num_slots,
        log=TreeLog(runner.pool.page_size, tokens=tokens) if tokens or config.replicas > 1 else None,
    )
    limits = Limits(
        context_length=context_length,
        vocab_size=shape.vocab_size,
        eos_token_ids=shape.eos_token_ids,
        kv_tokens=(num_pages - COW_PAGES) * runner.pool.page_size,
        max_output_tokens=config.max_output_tokens,
        more_room=_room(config, runner, draft_runner, context_length).remedy,
    )
    return runner, draft_runner, cache, limits


def _residency(
    cache: PrefixCache | NaiveCache, runner: Runner, draft_runner: Runner | None
) -> Residency | None:
    """None for pages that an option sets, and for those of a CUDA device: they stay."""
    if runner.budget is None or runner.budget.bound == "option" or runner.device.type != "cpu":
        return None
    pools = [each.pool for each in (runner, draft_runner) if each is not None]
    return Residency(cache, pools, runner.budget.kept)


def _room(config: EngineConfig, runner: Runner, draft_runner: Runner | None, context_length: int) -> KvRoom:
    assert runner.budget is not None
    shape = dataclasses.replace(runner.model.config, context_length=context_length)
    draft = None if draft_runner is None else draft_runner.model.config
    return room_of(config, shape, runner.pool.k.dtype, runner.device.type, runner.budget, draft)


def _model_info(
    orders: Orders, config: EngineConfig, runner: Runner, limits: Limits, room: KvRoom
) -> ModelInfo:
    assert config.max_running is not None
    assert config.chunk_tokens is not None
    weights = Path(orders.weights)
    found = trained(weights, {} if weights.is_dir() else read_header(weights).metadata)
    return ModelInfo(
        name=orders.model_name,
        path=orders.weights,
        vocab_size=limits.vocab_size,
        context_length=limits.context_length,
        eos_token_ids=limits.eos_token_ids,
        bos_token_id=runner.model.config.bos_token_id,
        dtype=str(runner.pool.dtype).removeprefix("torch."),
        device=runner.device.type,
        max_running=config.max_running,
        chunk_tokens=config.chunk_tokens,
        page_size=runner.pool.page_size,
        kv_room=room,
        pooling=pooling_of(weights),
        sampling_defaults=sampling_defaults_of(weights),
        trained_layout="" if found is None else found.layout,
        calibration=found.calibration if isinstance(found, DeciderConfig) else None,
        model_impl="native" if isinstance(runner.model, Model) else "transformers",
        chat_format=None,  # filled in by the tokenizer process
    )
