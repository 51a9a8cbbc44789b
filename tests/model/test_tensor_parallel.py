"""The ranks of a model, each with its part of the weights, give the logits of the whole model."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from ramify import cache
from ramify.errors import UnsupportedField
from ramify.kernels.registry import ops
from ramify.runtime.model import packed_cache
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.loading.load import load_model
from ramify.runtime.model.shape.config import Family

from . import dense, own_families
from .gguf_files import write_gguf
from .lockstep import load_parts
from .quantised_files import gptq, write

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

DENSE: tuple[Family, ...] = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm3", "olmo2", "granite",
)  # fmt: skip
SIZES = {"intermediate_size": 128}
"""An MLP size whose half is two groups of 32 inputs."""


def logits_in_turn(models: list[Model], lockstep: Any, ids: Tensor, step: int) -> Tensor:
    """The logits of the first rank, which alone has a head."""

    def hidden(model: Model) -> Tensor:
        attend, rows = dense.DenseAttend(model.config), []
        for start in range(0, len(ids), step):
            part = ids[start : start + step]
            rows.append(model(part, torch.arange(start, start + len(part)), attend))
        return torch.cat(rows)

    states = lockstep.run([partial(hidden, model) for model in models])
    for other in states[1:]:
        assert torch.equal(states[0], other), "ranks go apart"
    assert not any(model.head for model in models[1:])
    return models[0].logits(states[0])


def assert_parts_equal(weights: Path, count: int = 2, **options: Any) -> None:
    """Compare logits of prefill chunks and single tokens, by compiled kernels where matrices are packed."""
    files = ModelFiles(name="tiny", weights=weights, tokenizer=weights)
    options.setdefault("dtype", torch.float32)
    whole = load_model(files, **options)
    lockstep, models = load_parts(files, count, **options)
    for model in (whole, *models):
        model.use_kernels(ops("cpu"))
    ids = torch.tensor(own_families.PROMPTS[2][:20])
    want = dense.logits(whole, ids)
    for step in (7, 1):
        sums = lockstep.sums
        got = logits_in_turn(models, lockstep, ids, step)
        torch.testing.assert_close(got.float(), want.float(), atol=1e-4 * float(want.std()), rtol=0)
        least = 2 * whole.config.num_layers * -(-len(ids) // step)
        assert lockstep.sums - sums >= least, "two sums a layer and step"


@pytest.mark.parametrize("family", DENSE)
def test_a_folder_as_it_is_and_rounded(family: Family, tmp_path: Path) -> None:
    # int8 has groups of 64 inputs: two heads of 32 numbers on each rank.
    own_families.reference_of(family, tmp_path, **SIZES, head_dim=32)
    assert_parts_equal(tmp_path)
    for form in ("int8", "int4"):
        assert_parts_equal(tmp_path, quantization=form, packed=True)


@pytest.mark.parametrize("family", [each for each in DENSE if each not in ("phi3", "smollm3", "olmo2")])
def test_a_gguf_file(family: Family, tmp_path: Path) -> None:
    form = own_families.FAMILIES[family].gguf
    reference = own_families.reference_of(family, **form.options | SIZES)
    path = tmp_path / "tiny.gguf"
    kinds = {"ffn_down": "Q4_0", "attn_v": "Q5_1", "attn_k": "F16"}
    write_gguf(
        reference, path, form.architecture, metadata=form.metadata,
        matrices=GGMLQuantizationType.Q8_0,
        others={name: GGMLQuantizationType[kind] for name, kind in kinds.items()},
    )  # fmt: skip
    assert_parts_equal(path, quantization="gguf", packed=True)


@pytest.mark.parametrize("scheme", own_families.SCHEMES, ids=lambda scheme: scheme[2])
@pytest.mark.parametrize("family", ["qwen2", "phi3", "olmo2"])
def test_a_quantised_checkpoint(family: Family, scheme: Any, tmp_path: Path) -> None:
    config, quantise, _ = scheme
    write(own_families.reference_of(family, **SIZES), tmp_path, config, quantise)
    assert_parts_equal(tmp_path, quantization="checkpoint", packed=True)


def test_biases_of_outputs_are_added_once(tmp_path: Path) -> None:
    own_families.reference_of("llama", tmp_path, attention_bias=True, mlp_bias=True)
    assert_parts_equal(tmp_path)


def test_groups_that_a_border_would_cut_are_refused_or_dequantised(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
    reference = own_families.reference_of("llama", intermediate_size=192)
    write(reference, tmp_path, config, gptq(4, 64, symmetric=True))
    with pytest.raises(UnsupportedField, match=r"down_proj.weight .* 96 of its 192 inputs .* groups of 64"):
        assert_parts_equal(tmp_path, quantization="checkpoint", packed=True)
    assert_parts_equal(tmp_path)


def test_groups_that_do_not_lie_side_by_side_are_refused_or_dequantised(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": True}
    quantise = gptq(4, 16, symmetric=True, ordered=True)
    write(own_families.reference_of("llama", **SIZES), tmp_path, config, quantise)
    with pytest.raises(UnsupportedField, match="desc_act"):
        assert_parts_equal(tmp_path, quantization="checkpoint", packed=True)
    assert_parts_equal(tmp_path)


def test_each_rank_has_packed_weights_of_its_own_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path / "home"))
    path = tmp_path / "tiny.gguf"
    write_gguf(own_families.reference_of("llama", **SIZES), path, "llama")
    os.truncate(path, packed_cache.CACHED_FROM)  # with a hole at its end it is large enough
    for _ in "packed", "mapped":
        assert_parts_equal(path, quantization="int4", packed=True)
        cache.finish()
    entries = [path.name for path in (tmp_path / "home/packed").iterdir()]
    parts = [sum(f"-{part}of2-" in name for name in entries) for part in (1, 2)]
    assert (parts, len(entries)) == ([1, 1], 3), "the whole model has the third"
