"""Safetensors folders: sharded, tied, damaged, or of a model that is not implemented."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.errors import InvalidRequest, NotFound, UnsupportedField
from ramify.runtime.config import EngineConfig
from ramify.runtime.model import checkpoint
from ramify.runtime.model.checkpoint import ModelFiles, digest
from ramify.runtime.model.loading.load import dummy_model, load_model
from ramify.runtime.model.shape.hf_config import config_from_folder, config_from_hf

from .checkpoints import GEMMA2, Case, build, change, change_tensors, expected, prompt, save
from .dense import logits

LLAMA = Case("llama", "llama")
SMALL = {"vocab_size": 9, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 4}
SMALL |= {"num_attention_heads": 2, "max_position_embeddings": 64}
TIED = Case("tied", "llama", {"tie_word_embeddings": True})


def test_shards(tmp_path: Path) -> None:
    reference = build(LLAMA)
    files = save(reference, tmp_path, max_shard_size="30KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 3
    ids = prompt()
    model = load_model(files, dtype=torch.float32)
    torch.testing.assert_close(logits(model, ids), expected(reference, ids), atol=1e-4, rtol=0)
    shards[1].unlink()
    with pytest.raises(NotFound, match=shards[1].name):
        load_model(files, dtype=torch.float32)


@pytest.mark.parametrize(
    "case", [LLAMA, Case("qwen3", "qwen3", {"head_dim": 16}), GEMMA2], ids=lambda case: case.name
)
def test_bfloat16_errs_no_more_than_transformers_does(case: Case, tmp_path: Path) -> None:
    """Errors against float32 arithmetic on the same rounded weights: at most twice transformers'."""
    half = build(case, dtype=torch.bfloat16)
    files = save(half, tmp_path)
    ids = prompt()
    wanted = logits(load_model(files, dtype=torch.float32), ids)
    error = (logits(load_model(files, dtype=torch.bfloat16), ids) - wanted).abs()
    allowed = (expected(half, ids) - wanted).abs()
    assert error.max() <= 2 * allowed.max()
    assert error.mean() <= 1.2 * allowed.mean()


def test_a_tied_head_may_be_stored_as_well_if_it_is_the_same(tmp_path: Path) -> None:
    reference = build(TIED)
    files = save(reference, tmp_path)
    embedding = reference.get_input_embeddings().weight.detach()
    change_tensors(tmp_path, **{"lm_head.weight": embedding.clone()})
    assert load_model(files, dtype=torch.float32).config.tie_embeddings
    change_tensors(tmp_path, **{"lm_head.weight": embedding + 1})
    with pytest.raises(InvalidRequest, match=r"lm_head\.weight"):
        load_model(files, dtype=torch.float32)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.norm.weight": None}, r"lacks 1 .*model\.norm\.weight"),
        ({"model.extra.weight": torch.zeros(2)}, r"llama model does not: model\.extra\.weight"),
        ({"model.norm.weight": torch.zeros(7)}, r"model\.norm\.weight shape \(7,\)"),
        ({"model.norm.weight": torch.zeros(48, dtype=torch.int32)}, r"torch\.int32"),
        ({"model.norm.weight": torch.zeros(48, dtype=torch.float8_e4m3fn)}, r"float8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    changes: dict[str, torch.Tensor | None], said: str, tmp_path: Path
) -> None:
    files = save(build(LLAMA), tmp_path)
    change_tensors(tmp_path, **changes)
    with pytest.raises(InvalidRequest, match=said):
        load_model(files, dtype=torch.float32)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    files = save(build(LLAMA), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InvalidRequest, match="not a readable safetensors file"):
        load_model(files, dtype=torch.float32)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "falcon"}, "model_type"),
    ({"model_type": ...}, "model_type"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"num_local_experts": 8}, "num_local_experts"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0}}, "rope_type"),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "finetuned": True}},
        r"rope_scaling\.finetuned",
    ),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
]


@pytest.mark.parametrize(
    ("case", "fields", "named"),
    [
        *((LLAMA, *row) for row in REFUSED),
        (GEMMA2, {"hidden_activation": "relu"}, "hidden_activation"),
        (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA2, {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        (
            Case("", "gemma3_text", {"head_dim": 16}),
            {"attn_logit_softcapping": 9.0},
            "attn_logit_softcapping",
        ),
        (Case("", "smollm3"), {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            Case("", "smollm3"),
            {"use_sliding_window": True, "sliding_window": 4, "layer_types": ...},
            "use_sliding_window",
        ),
        (Case("", "olmo2"), {"hidden_act": "gelu"}, "hidden_act"),
        (Case("", "granite"), {"num_local_experts": 4}, "num_local_experts"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    case: Case, fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    save(build(case), tmp_path)
    config_from_folder(tmp_path)
    change(tmp_path, **fields)
    with pytest.raises(UnsupportedField, match=named):
        config_from_folder(tmp_path)


def test_longrope_needs_a_factor_for_each_pair() -> None:
    rope = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 3}
    with pytest.raises(InvalidRequest, match="long_factor"):
        config_from_hf(SMALL | {"model_type": "phi3", "rope_scaling": rope})


def test_gemma_3_as_it_is_published() -> None:
    """The 4B model's config.json, which leaves out what transformers has a default for."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    outer = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    config = config_from_hf({**outer, "eos_token_id": [1, 106], "text_config": text, "vision_config": {}})
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert (config.context_length, config.score_scale, config.tie_embeddings) == (131072, 1 / 16, True)
    assert config.windows == ((1024,) * 5 + (0,)) * 5 + (1024,) * 4
    assert {rope.theta for rope in config.ropes} == {1e4, 1e6}
    assert (config.ropes[5].theta, config.ropes[5].factor, config.ropes[0].kind) == (1e6, 8.0, "default")
    assert config.eos_token_ids == (1, 106)


def test_phi_4_mini_as_it_is_published() -> None:
    """The fields of its config.json that concern positions."""
    factors = [1.0 + index for index in range(48)]
    config = config_from_hf(
        SMALL
        | {"model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8}
        | {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
        | {"partial_rotary_factor": 0.75, "sliding_window": 262144}
        | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": factors}}
    )
    rope = config.rope
    assert (rope.kind, rope.rotated(config.head_dim), rope.original_context_length) == ("longrope", 96, 4096)
    assert (rope.factor, rope.long_factors) == (32.0, tuple(factors))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_size": ...}, "hidden_size"),
        ({"num_key_value_heads": 4}, "6 heads cannot share 4"),
        ({"rope_parameters": {"rope_type": "linear"}}, "without a factor"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "short_factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": "8"}}, r"rope_scaling.factor is '8'"),
    ],
)
def test_an_inconsistent_config_is_refused(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    save(build(LLAMA), tmp_path)
    change(tmp_path, **fields)
    with pytest.raises(InvalidRequest, match=said):
        config_from_folder(tmp_path)


def test_config_in_the_spelling_of_transformers_4(tmp_path: Path) -> None:
    scaling = {"factor": 4.0, "type": "yarn", "original_max_position_embeddings": 32}
    save(build(LLAMA), tmp_path)
    change(tmp_path, rope_parameters=..., rope_theta=5e5, rope_scaling=scaling, head_dim=None)
    config = config_from_folder(tmp_path)
    assert (config.rope.kind, config.rope.theta, config.rope.factor) == ("yarn", 5e5, 4.0)
    assert config.rope.original_context_length == 32
    assert config.head_dim == 8


def test_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    save(build(LLAMA), tmp_path)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [7, 2, 7]}))
    assert config_from_folder(tmp_path).eos_token_ids == (7, 2)
    generation.write_text("{}")
    assert config_from_folder(tmp_path).eos_token_ids == (2,)
    generation.write_text("[")
    with pytest.raises(InvalidRequest, match=r"generation_config\.json is not JSON"):
        config_from_folder(tmp_path)


def test_sliding_window_is_what_a_cache_may_drop() -> None:
    base = SMALL | {"model_type": "qwen2"}
    upper = config_from_hf(base | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2})
    assert upper.windows == (0, 0, 5, 5)
    assert upper.sliding_window == 0
    everywhere = config_from_hf(base | {"model_type": "mistral", "sliding_window": 5})
    assert everywhere.sliding_window == 5


def test_a_shorter_context(tmp_path: Path) -> None:
    files = save(build(LLAMA), tmp_path)
    model = load_model(files, dtype=torch.float32, context_length=50)
    assert model.config.context_length == 50
    ids = prompt()
    whole = load_model(files, dtype=torch.float32)
    torch.testing.assert_close(logits(model, ids), logits(whole, ids), atol=0, rtol=0)
    longer = load_model(files, dtype=torch.float32, context_length=129)
    torch.testing.assert_close(logits(longer, ids), logits(whole, ids), atol=0, rtol=0)
    with pytest.raises(InvalidRequest, match="context_length is 0; this model takes 1 to"):
        load_model(files, dtype=torch.float32, context_length=0)


def test_dummy_weights_are_random_and_repeatable(tmp_path: Path) -> None:
    save(build(Case("qwen3", "qwen3", {"head_dim": 16})), tmp_path)
    config = config_from_folder(tmp_path)
    ids = prompt()
    one, same, other = (
        logits(dummy_model(config, dtype=torch.float32, seed=seed), ids) for seed in (3, 3, 4)
    )
    assert torch.isfinite(one).all()
    assert one.std() > 0
    torch.testing.assert_close(one, same, atol=0, rtol=0)
    assert not torch.allclose(one, other)


def test_the_digest_is_that_of_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy elsewhere has the same one; a fine-tuned checkpoint of the same shapes has another."""
    monkeypatch.setattr(checkpoint, "BLOCK", 64)
    weights = bytearray(100_000)

    def copy(name: str) -> ModelFiles:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(weights)
        return ModelFiles(name=name, weights=folder, tokenizer=folder)

    config = EngineConfig(model="x")
    one, other = copy("one"), copy("other")
    (other.weights / "README.md").write_text("Downloaded elsewhere.")
    os.utime(other.weights / "config.json", (1, 1))
    found = digest(one, config)
    assert digest(other, config) == found
    assert digest(one, EngineConfig(model="x", quantization="int8")) != found
    (other.weights / "config.json").write_text("[]")
    assert digest(other, config) != found
    weights[-10_000::50] = b"1" * 200  # the tensors of the last layers
    assert digest(copy("tuned"), config) != found
