"""The layer stack, run by one call, gives the same bits as one call for each kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from ramify.kernels.cpu import attention, experts, linear
from ramify.kernels.registry import ops
from ramify.kernels.weights.rows import quantised
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor import build
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.kv_pool import KvPool
from ramify.runtime.executor.runner import Runner
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.layers import RMSNorm
from ramify.runtime.model.loading.load import FAMILIES
from ramify.runtime.model.quantization import Quantization, packing
from ramify.runtime.model.shape.hf_config import config_from_hf

PAGE = 8
PAGES = 24
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 256,
}
LLAMA = {**SHAPE, "model_type": "llama"}
QWEN2: dict[str, Any] = {
    **SHAPE,
    "model_type": "qwen2",
    "use_sliding_window": True,
    "sliding_window": 11,
    "max_window_layers": 1,
}
QWEN3 = {**SHAPE, "model_type": "qwen3"}
EXPERTS = {
    **SHAPE,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
QWEN2_MOE = {**EXPERTS, "model_type": "qwen2_moe", "mlp_only_layers": [1]}
OLMOE = {**EXPERTS, "model_type": "olmoe"}


def model_of(
    shape: dict[str, Any], dtype: torch.dtype, form: Quantization, *, mixed: bool = False, whole: bool = False
) -> Model:
    config = config_from_hf(shape)
    model = FAMILIES[config.family](config, dtype).eval()
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.2)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight.uniform_(0.5, 2.0)
    if mixed:
        for layer in model.layers:
            for (_, slot), kind in zip(layer.qkv.slots(), ("int4", "int8", "int4"), strict=True):
                assert slot.keep is not None
                slot.keep(quantised(slot.target, kind, 32))
    model.pack(packing(form, dtype, everything=whole))
    return model


def steps() -> list[list[Extension]]:
    """Three steps: prefills; then chunks and decodes; then decodes that share two pages."""
    ids = torch.randint(0, 96, (6, 80)).int().numpy()
    rows = [range(6), range(6, 12), range(12, 18)]
    stops = [(0, 17, 18), (0, 1, 9), (0, 40, 41)]
    first, second = (
        [Extension(ids[n], stops[n][step], stops[n][step + 1], rows[n]) for n in range(3)]
        for step in range(2)
    )
    return [first, second, [Extension(ids[n], 16, 17, [0, 1, 18 + n]) for n in range(6)]]


CASES = {
    "llama int4": (LLAMA, torch.bfloat16, "int4", False, False),
    "llama int8 pages": (LLAMA, torch.bfloat16, "int4", False, False),
    "qwen3 int8 pages": (QWEN3, torch.float32, "int4", False, False),
    "llama int8 float32": (LLAMA, torch.float32, "int8", False, False),
    "llama bf16": (LLAMA, torch.bfloat16, "none", False, False),
    "llama mixed": (LLAMA, torch.bfloat16, "int8", True, False),
    "llama deterministic float32": (LLAMA, torch.float32, "none", False, True),
    "qwen2 with windows": (QWEN2, torch.bfloat16, "int4", False, False),
    "qwen3 with head norms": (QWEN3, torch.float32, "int4", True, False),
    "experts": (QWEN2_MOE, torch.bfloat16, "int4", False, False),
    "experts and whole norms": (OLMOE, torch.float32, "none", False, True),
}


@pytest.mark.parametrize("name", CASES)
def test_every_bit_is_that_of_single_calls(name: str) -> None:
    shape, dtype, form, mixed, whole = CASES[name]
    kernels = ops("cpu", deterministic=whole)
    model = model_of(shape, dtype, form, mixed=mixed, whole=whole)  # type: ignore[arg-type]
    assert mixed == (len(model.layers[0].qkv.packed) > 1)  # type: ignore[union-attr,arg-type]
    runners = []
    for each in (kernels, dataclasses.replace(kernels, layer_stack=None)):
        kept = torch.int8 if name.endswith("int8 pages") else dtype
        pool = KvPool(model.config, num_pages=PAGES, page_size=PAGE, dtype=dtype, page_dtype=kept)
        pool.k.zero_(), pool.v.zero_()
        runners.append(Runner(model, pool, each))
    assert [runner.stacked for runner in runners] == [True, False]
    for extensions in steps():
        hidden = [runner.forward(pack(extensions, PAGE)).clone() for runner in runners]
        assert torch.equal(*hidden)
        assert hidden[0].isfinite().all()
        for pages in ("k", "v"):
            assert torch.equal(*(getattr(runner.pool, pages) for runner in runners))


@pytest.mark.parametrize(("option", "wanted"), [(None, True), (True, True), (False, False)])
def test_shared_prefixes_are_read_once_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, option: bool | None, wanted: bool
) -> None:
    kernels = ops("cpu")
    made: list[bool] = []

    def make(*args: Any, cascade: bool, **options: Any) -> Any:
        made.append(cascade)
        assert kernels.layer_stack is not None
        return kernels.layer_stack(*args, cascade=cascade, **options)

    recording = dataclasses.replace(kernels, layer_stack=make)
    monkeypatch.setattr(build, "resolve_ops", lambda *_: ("cpu", recording))
    config = EngineConfig(num_pages=5, dtype="bfloat16", device="cpu", cascade=option)
    build.build_runner(config, lambda *_: model_of(LLAMA, torch.bfloat16, "int4"))
    assert made == [wanted]


@pytest.mark.parametrize("shape", [LLAMA, QWEN2_MOE], ids=["dense", "experts"])
def test_it_goes_on_where_memory_was_short(shape: dict[str, Any]) -> None:
    """When its working memory grows between two operations, the stack continues without repeating any."""
    model = model_of(shape, torch.bfloat16, "int4")
    results = []
    for size in (1 << 20, 512):
        for arena in (linear.arena, attention.arena, experts.arena):
            arena.grow(size)
        pool = KvPool(model.config, num_pages=PAGES, page_size=PAGE, dtype=torch.bfloat16)
        runner = Runner(model, pool, ops("cpu"))
        torch.manual_seed(1)
        results.append([runner.forward(pack(extensions, PAGE)).clone() for extensions in steps()])
    assert linear.arena.size > 512
    assert attention.arena.size > 512
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_weights_that_are_not_packed_are_multiplied_layer_by_layer() -> None:
    config = config_from_hf(LLAMA)
    model = FAMILIES[config.family](config, torch.float32).eval()
    pool = KvPool(config, num_pages=PAGES, page_size=PAGE, dtype=torch.float32)
    assert model.layer_weights() is None
    assert not Runner(model, pool, ops("cpu")).stacked


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.int8])
def test_wrong_arguments_are_refused(kept: torch.dtype) -> None:
    model = model_of(LLAMA, torch.bfloat16, "int4")
    pool = KvPool(model.config, num_pages=PAGES, page_size=PAGE, dtype=torch.bfloat16, page_dtype=kept)
    make, weights = ops("cpu").layer_stack, model.layer_weights()
    assert make is not None
    assert weights is not None
    stack = make(weights, pool.k, pool.v, heads=6)
    batch = pack([Extension(torch.zeros(4).int().numpy(), 0, 4, range(1))], PAGE)
    rotation = model.rotations[0][batch.tokens[1]]
    lengths = batch.page_table, batch.query_starts, batch.kv_lens

    def call(x: torch.Tensor, slots: torch.Tensor, *lengths: torch.Tensor) -> None:
        stack(x, rotation, slots, *lengths, scale=1.0)  # type: ignore[call-arg,misc]

    x = torch.zeros(4, 72, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="it must be"):
        call(x[:, :64], batch.tokens[2], *lengths)
    with pytest.raises(ValueError, match=r"float32; it must be \(T, 72\) torch.bfloat16"):
        call(x.float(), batch.tokens[2], *lengths)
    with pytest.raises(ValueError, match="contiguous"):
        call(torch.zeros(72, 4, dtype=torch.bfloat16).T, batch.tokens[2], *lengths)
    with pytest.raises(ValueError):
        call(x, batch.tokens[2][:3], *lengths)
    with pytest.raises(ValueError, match="kv_lens"):
        call(x, batch.tokens[2], *lengths[:2], torch.tensor([900], dtype=torch.int32))
    with pytest.raises(ValueError, match="3"):
        make([dataclasses.replace(weights[0], qkv=[])], pool.k, pool.v, heads=6)
    with pytest.raises(ValueError, match="heads"):
        make(weights, pool.k, pool.v, heads=8)
