"""Hybrids of gated delta-net layers and attention compute what transformers computes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from ramify.errors import UnsupportedField
from ramify.kernels.registry import Ops, ops
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.kv_pool import KvPool, StatePool
from ramify.runtime.executor.runner import Runner
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.loading.load import load_model
from ramify.runtime.model.shape.config import Family, ModelConfig
from ramify.runtime.model.shape.hf_config import config_from_hf

from . import quantised_files as files
from .checkpoints import expected, save
from .equality import assert_engine_equal, native
from .gguf_files import write_gguf
from .hybrids import DENSE, MOE, NEXT, build_hybrid
from .own_families import FAMILIES, HYBRIDS, assert_lora_equal, reference_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

PAGE = 4
LENGTHS = (40, 26)
CUTS = [[0, 1, 4, 21, 22, 40], [0, 17, 18, 19, 25, 26]]
"""Prefills, chunks and single tokens of two prompts, in five steps."""


@pytest.fixture(scope="module", params=[NEXT, DENSE, MOE], ids=lambda case: case.name)
def checkpoint(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ModelFiles]:
    reference = build_hybrid(request.param)
    return reference, save(reference, tmp_path_factory.mktemp(request.param.name))


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 320, (length,), generator=generator) for length in LENGTHS]


def logits(model: Any, kernels: Ops, cuts: Sequence[Sequence[int]], *, packed: bool = True) -> list[Tensor]:
    """Logits of every position of the two prompts, from pages and states that begin as NaN."""
    config: ModelConfig = model.config
    assert config.states is not None
    pool = KvPool(config, num_pages=24, page_size=PAGE, dtype=torch.float32)
    states = StatePool(config.states, num_slots=4)
    for tensor in (pool.k, pool.v, states.conv, states.recurrent):
        tensor.fill_(torch.nan)
    runner = Runner(model, pool, kernels, states=states)
    rows: list[list[Tensor]] = [[], []]
    steps = list(zip(*(itertools.pairwise(each) for each in cuts), strict=True))
    for spans in steps:
        parts = [
            (place, Extension(ids.int().numpy(), *span, range(12 * place, 12 * place + 12), 3 - place))
            for place, (ids, span) in enumerate(zip(prompts(), spans, strict=True))
        ]
        for batch in [parts] if packed else [parts[:1], parts[1:]]:
            hidden = runner.forward(pack([extension for _, extension in batch], PAGE))
            sizes = [extension.stop - extension.start for _, extension in batch]
            for (place, _), part in zip(batch, runner.logits(hidden).split(sizes), strict=True):
                rows[place].append(part.clone())
    return [torch.cat(each) for each in rows]


def test_logits_of_a_ragged_batch_equal_transformers(checkpoint: tuple[Any, ModelFiles]) -> None:
    reference, saved = checkpoint
    wanted = [expected(reference, ids) for ids in prompts()]
    assert min(each.std() for each in wanted) > 0.3
    model = load_model(saved, dtype=torch.float32)
    for kernels, cuts in ((ops("cpu"), CUTS), (ops("torch"), CUTS), (ops("cpu"), [[0, 40], [0, 26]])):
        for got, want in zip(logits(model, kernels, cuts), wanted, strict=True):
            torch.testing.assert_close(got, want, atol=2e-4, rtol=0)


@pytest.mark.parametrize("checkpoint", [NEXT], indirect=True, ids=lambda case: case.name)
def test_bits_are_those_of_one_prefill_alone(checkpoint: tuple[Any, ModelFiles]) -> None:
    reference, saved = checkpoint
    kernels = ops("cpu", deterministic=True)
    model = load_model(saved, dtype=torch.float32, packed=True, deterministic=True)
    alone = logits(model, kernels, [[0, 40], [0, 26]], packed=False)
    for got, want in zip(logits(model, kernels, CUTS), alone, strict=True):
        assert torch.equal(got, want)
    torch.testing.assert_close(alone[0], expected(reference, prompts()[0]), atol=2e-4, rtol=0)


@pytest.mark.parametrize("checkpoint", [NEXT], indirect=True, ids=lambda case: case.name)
def test_int8_weights_stay_close(checkpoint: tuple[Any, ModelFiles]) -> None:
    reference, saved = checkpoint
    model = load_model(saved, dtype=torch.float32, quantization="int8")
    got = logits(model, ops("cpu"), CUTS)[0]
    want = expected(reference, prompts()[0])
    assert 0.0 < (got - want).std() < 0.1 * want.std()


def test_the_engine_gives_transformers_tokens(tmp_path: Path) -> None:
    """Requests that are cold, chunked, forked, retracted and from the cache."""
    reference = build_hybrid(DENSE)
    reference.save_pretrained(tmp_path)
    assert_engine_equal(reference, native(tmp_path))


def test_adapters_of_all_projections_equal_merged_weights(tmp_path: Path) -> None:
    """Four projections are one matrix in the layers with states."""
    assert_lora_equal("qwen3_5", tmp_path)


def test_the_text_part_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """The checkpoint has layers that predict further tokens as well, which are left out."""
    text = build_hybrid(DENSE)
    saved = save(text, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
    whole |= {"tie_word_embeddings": True, "text_config": config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(tmp_path / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
    others = {"model.visual.patch_embed.proj.weight": torch.zeros(3), "mtp.fc.weight": torch.zeros(3)}
    save_file(named | others, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_model(saved, dtype=torch.float32)
    got = logits(model, ops("cpu"), [[0, 40], [0, 26]])[0]
    torch.testing.assert_close(got, expected(text, prompts()[0]), atol=2e-4, rtol=0)


BLOCKS = {"hidden_size": 64, "intermediate_size": 96, "shared_expert_intermediate_size": 32}
"""Rows of whole blocks."""


def from_gguf(reference: Any, path: Path, architecture: str, form: Any = "none", **options: Any) -> Any:
    path.unlink(missing_ok=True)
    write_gguf(reference, path, architecture, nextn=True, **options)
    return native(path, quantization=form)


@pytest.mark.parametrize("family", HYBRIDS)
def test_gguf_files(family: Family, tmp_path: Path) -> None:
    """Files whose layers for multi-token prediction are left out."""
    form = FAMILIES[family].gguf
    architecture, reference = form.architecture, reference_of(family, **BLOCKS, **form.options)
    path, alone = tmp_path / "tiny.gguf", [[0, 40], [0, 26]]
    wanted, shape = expected(reference, prompts()[0]), config_from_hf(reference.config.to_dict())
    for legacy in {False, architecture == "qwen3next"}:
        model = from_gguf(reference, path, architecture, legacy=legacy)
        for field in ("states", "linear", "experts", "num_layers", "qkv_bias", "output_bias"):
            assert getattr(model.config, field) == getattr(shape, field), field
        torch.testing.assert_close(logits(model, ops("cpu"), alone)[0], wanted, atol=2e-4, rtol=0)

    types: dict[str, Any] = {
        "matrices": GGMLQuantizationType.Q8_0,
        "others": {"attn_qkv": GGMLQuantizationType.Q4_1},
    }
    wanted = logits(from_gguf(reference, path, architecture, **types), ops("cpu"), alone)[0]
    model = from_gguf(reference, path, architecture, "gguf", **types)
    model.use_kernels(ops("cpu"))
    first = model.get_submodule("layers.0")
    assert [part.format for part in first.projection.packed] == ["int4", "int8"]
    assert len(first.output.packed[0].order) == (0 if architecture == "qwen3next" else 128)
    got = logits(model, ops("cpu"), alone)[0]
    torch.testing.assert_close(got, wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize("method", ["fp8", "gptq"])
def test_rows_in_another_order_keep_their_scales(method: str, tmp_path: Path) -> None:
    """Blocks of rows are wider than the parts of a key head."""
    config: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    quantise = files.fp8("weight_scale_inv", torch.float32, block=64)
    if method == "gptq":
        config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
        quantise = files.gptq(4, 32, symmetric=False, ordered=True)
    reference = build_hybrid(NEXT, **BLOCKS, num_experts=0)
    reference = files.write(reference, tmp_path, config, quantise)
    model = native(tmp_path, quantization="checkpoint", packed=True)
    (projection,) = model.get_submodule("layers.0").projection.packed
    assert projection.format == ("fp8" if method == "fp8" else "int4")
    got = logits(model, ops("cpu"), [[0, 40], [0, 26]])[0]
    torch.testing.assert_close(got, expected(reference, prompts()[0]), atol=2e-4, rtol=0)


def test_the_shape_of_a_hybrid() -> None:
    config = build_hybrid(DENSE).config.to_dict()
    shape = config_from_hf(config)
    assert (shape.num_layers, shape.depth, shape.linear) == (1, 3, (True, True, False))
    assert shape.states is not None
    assert (shape.states.layers, shape.states.channels, shape.states.key_heads) == (2, 192, 2)
    assert shape.states.bytes == 4 * 2 * (192 * 3 + 4 * 16 * 32)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({"layer_types": ["linear_attention", "full_attention", "chunked_attention"]}, "layer_types"),
        ({"linear_key_head_dim": 24}, "linear_key_head_dim"),
    ],
)
def test_what_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    config = build_hybrid(DENSE).config.to_dict()
    with pytest.raises(UnsupportedField) as refused:
        config_from_hf({**config, **change})
    assert refused.value.field == field
