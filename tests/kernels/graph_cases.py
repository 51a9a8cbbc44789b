"""A runner of two layers, and steps that are planned for CUDA graphs; nothing is compiled or run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ramify.kernels.registry import ops
from ramify.kernels.triton.plan.attention_plan import Plan
from ramify.kernels.triton.planner import Planner
from ramify.runtime.executor.batch import Extension, ForwardBatch, pack
from ramify.runtime.executor.decode_graphs import DecodeGraphs
from ramify.runtime.executor.kv_pool import KvPool
from ramify.runtime.executor.runner import Runner
from ramify.runtime.executor.token_graphs import TokenGraphs
from ramify.runtime.model.loading.load import dummy_model
from ramify.runtime.model.shape.hf_config import config_from_hf
from tests.kernels.test_triton_warm_up import SHAPE

PAGE = 16
HEADS, KV_HEADS = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]


def planner_of(*, window: int = 0, deterministic: bool = False) -> Planner:
    """The planner of Llama-3.1-8B's shape, with the figures of an H100."""
    return Planner(
        heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, page_size=64, window=window,
        device=torch.device("cpu"), deterministic=deterministic, cascade=True,
    )  # fmt: skip


def plan_of(planner: Planner, batch: ForwardBatch) -> Plan:
    lists = (np.asarray(each) for each in (batch.page_table, batch.query_starts, batch.kv_lens))
    return planner.plan(*lists, torch.device("cpu"))


def runner_of() -> Runner:
    model = dummy_model(config_from_hf(SHAPE), dtype=torch.bfloat16)
    pool = KvPool(model.config, num_pages=1200, page_size=PAGE, dtype=torch.bfloat16)
    return Runner(model, pool, ops("triton"))


def graphs_of(runner: Runner) -> DecodeGraphs:
    graphs = runner._graphs
    assert graphs is not None
    return graphs


def token_graphs_of(runner: Runner) -> TokenGraphs:
    graphs = runner._token_graphs
    assert graphs is not None
    return graphs


def forms_of(graphs: DecodeGraphs | TokenGraphs) -> list[int]:
    """The size of each captured form, as an index of `sizes`."""
    return [index for index, _ in graphs.steps.steps]


def replays(graphs: DecodeGraphs | TokenGraphs) -> Iterator[None]:
    """Run each captured step once, one an iteration."""
    for (index, _), step in graphs.steps.steps.items():
        graphs._run(index, step)
        yield


def decodes(lengths: list[int], *, shared: int = 0) -> ForwardBatch:
    """Decodes of `lengths`, whose first `shared` pages are the same."""
    ids = np.zeros(max(lengths), np.int32)
    tables, free = [], shared
    for length in lengths:
        own = -(-length // PAGE) - shared
        tables.append([*range(shared), *range(free, free + own)])
        free += own
    spans = zip(lengths, tables, strict=True)
    return pack([Extension(ids, length - 1, length, pages) for length, pages in spans], PAGE)


def step_of(*spans: tuple[int, int]) -> ForwardBatch:
    """Requests that share nothing, each with its last `new` of `length` tokens."""
    ids, extensions, page = np.zeros(8192, np.int32), [], 0
    for new, length in spans:
        pages = -(-length // PAGE)
        extensions.append(Extension(ids, length - new, length, range(page, page + pages)))
        page += pages
    return pack(extensions, PAGE)
