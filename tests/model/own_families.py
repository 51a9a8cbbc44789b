"""Tiny random models of our own families, in each form that a row of docs/models.md tells of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType

from ramify.runtime.model.shape.config import Family
from tests.runtime.oracle import greedy

from . import hybrids
from .adapters import ALL, merge, write_adapter
from .architectures import tiny_config, tiny_model
from .equality import PROMPTS, assert_engine_equal, assert_logits_equal, native
from .gguf_files import write_gguf
from .quantised_files import FLOAT, Quantise, compressed, fp8, integers, packed, write, write_mxfp4

DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Gguf:
    architecture: str
    metadata: dict[str, int | float | str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the model, where files cannot say what the family's own options say."""
    experts: GGMLQuantizationType = GGMLQuantizationType.F32
    """The type of the experts' matrices, which are random blocks of it."""


@dataclass(frozen=True)
class Own:
    gguf: Gguf
    """The form as a GGUF file; the name alone of architectures that are refused."""
    options: dict[str, Any] = field(default_factory=dict)
    adapted: tuple[str, ...] = ALL
    """The modules that a LoRA adapter may change: all projections but those of experts."""


COUNTS: dict[str, int | float | str] = {"expert_count": 8, "expert_used_count": 2}
GROUPED = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.75, "use_qk_norm": True}
GRANITE = {"residual_multiplier": 0.4, "embedding_multiplier": 3.0, "attention_multiplier": 0.2}
GRANITE_SCALES: dict[str, int | float | str] = {
    "residual_scale": 0.4,
    "embedding_scale": 3.0,
    "attention.scale": 0.2,
    "logit_scale": 1.0,
}
WINDOW: dict[str, int | float | str] = {"attention.sliding_window": 8}
YARN: dict[str, int | float | str] = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 32.0,
    "rope.scaling.original_context_length": 4096,
}
GEMMA = {"query_pre_attn_scalar": 16}  # the head's size, which GGUF files take it to be

FAMILIES: dict[Family, Own] = {
    "llama": Own(Gguf("llama")),
    "mistral": Own(Gguf("llama", WINDOW)),
    "qwen2": Own(Gguf("qwen2", options={"use_sliding_window": False})),
    "qwen3": Own(Gguf("qwen3")),
    "gemma2": Own(Gguf("gemma2", WINDOW, {"tie_word_embeddings": True}), GEMMA),
    "gemma3": Own(Gguf("gemma3", WINDOW, {"num_hidden_layers": 7, "layer_types": None}), GEMMA),
    "phi3": Own(Gguf("phi3"), adapted=("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "smollm3": Own(Gguf("smollm3"), {"no_rope_layers": [1, 0]}),
    "olmo2": Own(Gguf("olmo2")),
    "granite": Own(
        Gguf("granite", {**GRANITE_SCALES, "logit_scale": 1.7}), {**GRANITE, "logits_scaling": 1.7}
    ),
    "mixtral": Own(Gguf("llama", {**COUNTS, **WINDOW}), adapted=ATTENTION),
    "qwen2_moe": Own(  # files have no names for its dense layers
        Gguf("qwen2moe", COUNTS, {"mlp_only_layers": []}), {"mlp_only_layers": [0]}, ATTENTION
    ),
    "qwen3_moe": Own(
        Gguf("qwen3moe", {**COUNTS, "expert_used_count": 3}),
        {"norm_topk_prob": True, "num_experts_per_tok": 3},
        ATTENTION,
    ),
    "olmoe": Own(Gguf("olmoe", COUNTS), adapted=ATTENTION),
    "granitemoe": Own(Gguf("granitemoe", {**COUNTS, **GRANITE_SCALES}), GRANITE, ATTENTION),
    "granitemoeshared": Own(
        Gguf("granitemoe", {**COUNTS, **GRANITE_SCALES}),
        {**GRANITE, "shared_intermediate_size": 56},
        ATTENTION,
    ),
    "glm4_moe": Own(
        Gguf(
            "glm4moe",
            {
                **COUNTS,
                "rope.dimension_count": 8,
                "expert_weights_scale": 1.75,
                "expert_group_count": 4,
                "expert_group_used_count": 2,
            },
        ),
        {"n_shared_experts": 2, **GROUPED},
        ATTENTION,
    ),
    "gpt_oss": Own(  # files have no limit of their own; some of the tiny numbers exceed 0.7
        Gguf("gpt-oss", {**COUNTS, **WINDOW, **YARN}, {"swiglu_limit": 7.0}, GGMLQuantizationType.MXFP4),
        {"swiglu_limit": 0.7},
        ATTENTION,
    ),
    "qwen3_next": Own(  # files have no names for its dense layers
        Gguf("qwen3next", options={"mlp_only_layers": []}),
        adapted=(*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"),
    ),
    "qwen3_5": Own(Gguf("qwen35"), adapted=(*ALL, *DELTA)),
    "qwen3_5_moe": Own(Gguf("qwen35moe"), adapted=(*ATTENTION, *DELTA)),
}
HYBRIDS = {"qwen3_next": hybrids.NEXT, "qwen3_5": hybrids.DENSE, "qwen3_5_moe": hybrids.MOE}


def reference_of(family: Family, folder: Path | None = None, **options: Any) -> Any:
    """The library's own model; with a `folder`, a checkpoint of it is written there."""
    if family in HYBRIDS:
        model = hybrids.build_hybrid(HYBRIDS[family], **options)
    else:
        name = "gemma3_text" if family == "gemma3" else family
        model = tiny_model(tiny_config(name, **FAMILIES[family].options | options))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(2))
    if folder is not None:
        model.save_pretrained(folder)
    return model


def write_gguf_of(family: Family, path: Path) -> Any:
    """The model in the file that llama.cpp's converter would write."""
    form = FAMILIES[family].gguf
    reference = reference_of(family, **form.options)
    experts = {f"ffn_{part}_exps": form.experts for part in ("gate", "up", "down")}
    write_gguf(reference, path, form.architecture, metadata=form.metadata, others=experts, random=True)
    return reference


def assert_gguf_equal(family: Family, folder: Path) -> None:
    """Compare logits of the family's GGUF file. Raises `UnsupportedField` for an architecture that is not
    read."""
    path = folder / "tiny.gguf"
    reference = write_gguf_of(family, path)
    assert_logits_equal(reference, native(path))


SCHEMES: tuple[tuple[dict[str, Any], Quantise, str], ...] = (
    (
        compressed("float-quantized", {**FLOAT, "strategy": "channel"}),
        fp8("weight_scale", torch.bfloat16),
        "fp8",
    ),
    (compressed("pack-quantized", integers(4, 32)), packed(4, 32, symmetric=True), "int4"),
)
"""Schemes of compressed-tensors: FP8 with a scale for each output, and W4A16 in groups of 32."""


def assert_quantised_equal(family: Family, folder: Path) -> None:
    """Compare checkpoints by `SCHEMES` (gpt-oss: in MXFP4), kept packed, with the logits of their values."""
    if family == "gpt_oss":
        reference = reference_of(family)
        write_mxfp4(reference, folder)
        assert_packed_equal(reference, folder, "int4")
        return
    for config, quantise, form in SCHEMES:
        at = folder / form
        reference = write(reference_of(family), at, config, quantise)
        assert_packed_equal(reference, at, form)


def assert_packed_equal(reference: Any, folder: Path, form: str) -> None:
    model = native(folder, quantization="checkpoint", packed=True)
    formats = {weight.format for module in model.modules() for weight in getattr(module, "packed", ())}
    assert formats - {"f32"} == {form}, "routers alone are floats"
    assert_logits_equal(reference, model)


def assert_lora_equal(family: Family, folder: Path, *, packed: bool = False) -> None:
    """Compare the engine with a random adapter with transformers on the merged weights."""
    base = folder / "base"
    reference = reference_of(family, base)
    adapter = write_adapter(folder / "adapter", base, seed=1, targets=FAMILIES[family].adapted, size=0.15)
    merged = type(reference).from_pretrained(
        merge(folder / "merged", base, adapter, 2.0), dtype=torch.float32
    )
    before, after = (greedy(model, PROMPTS[0], 12).ids for model in (reference, merged.eval()))
    assert before != after
    assert_engine_equal(merged, native(base, packed=packed, deterministic=packed), adapter=adapter)
