"""Attention by FlashInfer, against a stand-in for the library that is as strict; the reference computes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ramify.errors import UnsupportedField
from ramify.kernels import registry
from ramify.kernels.flashinfer import FlashInferPlanner
from ramify.kernels.machine.errors import KernelUnavailable
from ramify.kernels.reference.attention import paged_attention
from ramify.kernels.registry import Ops, ops
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor import build
from ramify.runtime.executor import device as devices
from ramify.runtime.executor.attention import FlashInferAttention, has_cascade
from ramify.runtime.model.shape.config import ModelShape
from tests.kernels.attention_cases import Batch, make_batch
from tests.kernels.flashinfer_stub import Stub, flashinfer
from tests.model.checkpoints import GEMMA2, Case, save
from tests.model.checkpoints import build as build_tiny
from tests.runtime import local
from tests.runtime.local import LocalScheduler, Result

__all__ = ["flashinfer"]

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
DECODES = [(1, 1), (1, 16), (1, 17), (1, 300)]
MIXED = [(1, 300), (50, 50), (37, 290), (3, 130), (1, 64), (5, 65)]


def with_flashinfer() -> Ops:
    """The torch kernels with attention by FlashInfer."""
    return dataclasses.replace(ops("torch"), flashinfer=FlashInferPlanner)


@pytest.mark.parametrize("lengths", [DECODES, MIXED])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (23, 0.0), (0, 20.0), (1, 30.0)])
@pytest.mark.parametrize("page_size", [16, 64])
def test_a_batch_is_planned_once_and_run_for_each_layer(
    flashinfer: Stub, lengths: Sequence[tuple[int, int]], window: int, soft_cap: float, page_size: int
) -> None:
    batch = make_batch(lengths, page_size=page_size, dtype=torch.bfloat16)
    planner = planner_of(batch, window=window, soft_cap=soft_cap, scale=0.11)
    lists = (each.numpy() for each in (batch.page_table, batch.query_starts, batch.kv_lens))
    planner.plan(*lists)
    expected = paged_attention(*batch, scale=0.11, window=window, soft_cap=soft_cap)
    # As the layers have it: a view of rows that hold keys and values too.
    q = torch.cat([batch.q, batch.q], dim=1)[:, : batch.q.shape[1]]
    for _ in range(3):
        assert torch.equal(planner.run(q, batch.k_pages, batch.v_pages), expected)
    kind = "decode" if lengths is DECODES else "prefill"
    assert flashinfer.calls == [(kind, "plan"), *[(kind, "run")] * 3]


def planner_of(
    batch: Batch, *, window: int = 0, soft_cap: float = 0.0, scale: float = 0.1
) -> FlashInferPlanner:
    return FlashInferPlanner(
        heads=batch.q.shape[1],
        kv_heads=batch.k_pages.shape[1],
        head_dim=batch.q.shape[2],
        dtype=batch.q.dtype,
        page_size=batch.k_pages.shape[2],
        window=window,
        scale=scale,
        soft_cap=soft_cap,
        device=CPU,
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "on_tensor_cores"), [(6, 6, False), (9, 3, False), (7, 1, True)]
)
def test_every_group_has_a_kernel(flashinfer: Stub, heads: int, kv_heads: int, on_tensor_cores: bool) -> None:
    batch = make_batch(DECODES, heads=heads, kv_heads=kv_heads)
    planner = planner_of(batch)
    planner.warm_up(batch.k_pages, batch.v_pages)
    assert flashinfer.calls == [
        ("decode", "plan"),
        ("decode", "run"),
        ("prefill", "plan"),
        ("prefill", "run"),
    ]
    assert flashinfer.made[0].use_tensor_cores == on_tensor_cores


def test_planners_of_a_device_share_a_workspace(flashinfer: Stub) -> None:
    batch = make_batch(DECODES)
    planners = [planner_of(batch), planner_of(batch, window=5)]
    assert len({each.workspace.data_ptr() for each in flashinfer.made}) == 1
    from ramify.kernels.flashinfer import OWN_BYTES, WORKSPACE

    attention = FlashInferAttention({0: planners[0], 5: planners[1]})
    assert attention.most_state_bytes() == WORKSPACE + 2 * OWN_BYTES


def test_a_plan_waits_until_the_one_before_it_is_copied(
    flashinfer: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapper writes each plan into the same pinned memory, from which the device copies it later."""
    batch = make_batch(DECODES)
    planner = planner_of(batch)
    events = flashinfer.calls

    class Event:
        def record(self) -> None:
            events.append(("copied", "record"))

        def synchronize(self) -> None:
            events.append(("copied", "wait"))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(planner, "_host", torch.from_numpy)
    monkeypatch.setattr("ramify.kernels.flashinfer.to_device", lambda array, device: torch.from_numpy(array))
    monkeypatch.setattr(planner, "_device", SimpleNamespace(type="cuda"))
    lists = [each.numpy() for each in (batch.page_table, batch.query_starts, batch.kv_lens)]
    for _ in range(2):
        planner.plan(*lists)
    planned = [("decode", "plan"), ("copied", "record")]
    assert events == [*planned, ("copied", "wait"), *planned]


# --- whole models -----------------------------------------------------------------------------------


def answers(
    folder: Path, kernels: Ops, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Result], LocalScheduler]:
    """Prefill in chunks, cached prefixes, copy-on-write of a shared page, batches of mixed lengths."""
    monkeypatch.setattr(local, "resolve_ops", lambda config, device: ("torch", kernels))
    base = [(7 * place) % 250 + 3 for place in range(45)]
    found = LocalScheduler(folder, page_size=8, chunk_tokens=32, num_pages=64, attention_backend="torch")
    prompts = [base, base[:3], [*base[:20], 7, 8]]
    options = {"max_tokens": 5, "ignore_eos": True, "logprobs": 2, "temperature": 1.0, "seed": 3}
    first = found.complete(prompts, **options)
    again = found.complete([[*base[:21], 1, 2, 3], base], **options)
    return first + again, found


@pytest.mark.parametrize(
    ("case", "windows"), [(Case("", "llama", {}), 1), (GEMMA2, 2)], ids=["llama", "windows and soft caps"]
)
def test_outputs_are_those_of_the_reference(
    case: Case, windows: int, flashinfer: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(build_tiny(case), tmp_path)
    expected, _ = answers(tmp_path, ops("torch"), monkeypatch)
    found, scheduler = answers(tmp_path, with_flashinfer(), monkeypatch)
    assert [(each.ids, each.logprobs) for each in found] == [(each.ids, each.logprobs) for each in expected]
    assert len({token for each in found for token in each.ids}) > 3, "the model says too little"
    assert isinstance(scheduler.runner.attention, FlashInferAttention)
    assert len(scheduler.runner.attention.planners) == windows
    layers = scheduler.runner.model.config.num_layers
    plans = [call for call in flashinfer.calls if call[1] == "plan"]
    assert set(plans) == {("prefill", "plan"), ("decode", "plan")}
    assert len(flashinfer.calls) - len(plans) == len(plans) // windows * layers


# --- refusals ---------------------------------------------------------------------------------------


def shape_of(**changes: Any) -> ModelShape:
    fields = {
        "family": "f",
        "vocab_size": 9,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
    }
    return ModelShape(**{**fields, "context_length": 99, "windows": (0,), **changes})


@pytest.mark.parametrize(
    ("changes", "dtype", "lacks"),
    [
        ({"head_dim": 96}, torch.bfloat16, r"heads of 96 numbers \(it has 64, 128, 256\)"),
        ({"sinks": (True,)}, torch.bfloat16, "attention sinks"),
        ({"head_dim": 80, "sinks": (True,)}, torch.float32, "heads of 80.*; attention sinks; dtype float32"),
    ],
)
def test_what_it_lacks_is_refused_by_name(changes: dict[str, Any], dtype: torch.dtype, lacks: str) -> None:
    asked = EngineConfig(attention_backend="flashinfer")
    with pytest.raises(UnsupportedField, match=f"lacks what this model needs: {lacks}") as refused:
        devices.check_attention(asked, shape_of(**changes), dtype)
    assert refused.value.field == "attention_backend"
    devices.check_attention(EngineConfig(), shape_of(**changes), dtype)
    devices.check_attention(asked, shape_of(windows=(7,), attention_soft_cap=30.0), torch.bfloat16)


def test_sinks_are_never_ignored(flashinfer: Stub) -> None:
    batch = make_batch(DECODES)
    attention = FlashInferAttention({0: planner_of(batch)})
    lists: Any = SimpleNamespace(
        page_table=batch.page_table, query_starts=batch.query_starts, kv_lens=batch.kv_lens
    )
    attend = attention.step(lists, CPU)
    with pytest.raises(ValueError, match="sinks"):
        attend(batch.q, batch.k_pages, batch.v_pages, 0, torch.zeros(9))


def test_where_it_cannot_run_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = EngineConfig(attention_backend="flashinfer")
    with pytest.raises(UnsupportedField, match="needs a CUDA device"):
        devices.resolve_ops(asked, CPU)
    exact = dataclasses.replace(asked, deterministic=True)
    with pytest.raises(UnsupportedField, match="whose bits depend on the batch"):
        devices.resolve_ops(exact, CUDA)
    with pytest.raises(KernelUnavailable, match="no deterministic form"):
        ops("flashinfer", deterministic=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(UnsupportedField, match="flashinfer cannot be imported") as refused:
        devices.resolve_ops(asked, CUDA)
    assert "pip install 'ramify-llm[flashinfer]'" in str(refused.value.remedy)
    with pytest.raises(UnsupportedField, match="reads pages in the model's dtype"):
        devices.resolve_page_dtype(EngineConfig(kv_cache_dtype="fp8"), "flashinfer", CUDA, torch.bfloat16)


def test_it_has_no_cascade_and_no_graphs(flashinfer: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = dataclasses.replace(ops("torch"), planner=object)  # type: ignore[arg-type]
    monkeypatch.setattr(registry, "_triton_ops", lambda *_: triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    asked = EngineConfig(attention_backend="flashinfer")
    backend, found = devices.resolve_ops(asked, CUDA)
    assert (backend, found.planner, found.flashinfer) == ("flashinfer", None, FlashInferPlanner)
    assert not has_cascade(found)
    assert not build._wants_graphs(asked, CUDA, found)
    for name, wants in (("cascade", build._wants_cascade), ("cuda_graphs", build._wants_graphs)):
        config = dataclasses.replace(asked, **{name: True})
        arguments: Any = (config, backend, found) if name == "cascade" else (config, CUDA, found)
        with pytest.raises(UnsupportedField, match=f"{name} is set"):
            wants(*arguments)
