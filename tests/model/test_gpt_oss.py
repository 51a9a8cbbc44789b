"""gpt-oss of our own: what transformers computes, packed or not, and in the whole engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ramify.runtime.model.experts import MixtureOfExperts
from ramify.runtime.model.shape.hf_config import config_from_hf
from tests.model.equality import assert_engine_equal, assert_logits_equal, native
from tests.model.own_families import reference_of, write_gguf_of
from tests.model.quantised_files import write_mxfp4

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("gpt_oss")
    return reference_of("gpt_oss", folder), folder


def test_logits_equal_transformers(saved: tuple[Any, Path]) -> None:
    reference, folder = saved
    model = native(folder)
    assert model.config.windows == (8, 0)
    assert model.config.sinks == (True, True)
    assert model.config.rope.kind == "yarn"
    assert_logits_equal(reference, model)


def test_the_engine_gives_the_tokens_of_transformers(saved: tuple[Any, Path]) -> None:
    """Requests that are cold, chunked, forked, retracted and cached, with all layers in one compiled call."""
    reference, folder = saved
    model = native(folder, packed=True, deterministic=True)
    assert model.layer_weights() is not None
    assert_logits_equal(reference, model)
    assert_engine_equal(reference, model)


def test_a_folder_in_mxfp4_stays_packed(tmp_path: Path) -> None:
    """The published form: blocks, scales and biases of all experts of a layer. The values are the library's
    own."""
    reference = reference_of("gpt_oss")
    write_mxfp4(reference, tmp_path)
    model = native(tmp_path, quantization="checkpoint", packed=True, deterministic=True)
    for layer in model.layers:
        assert isinstance(layer.mlp, MixtureOfExperts)
        router, gate_up, down = layer.mlp.packed
        assert (router.format, gate_up.format, down.format) == ("f32", "int4", "int4")
        assert len(gate_up.table) == 16
    assert model.layer_weights() is not None
    assert_logits_equal(reference, model)
    assert_logits_equal(reference, native(tmp_path))


def test_gguf_files_with_sinks_and_packed_experts(tmp_path: Path) -> None:
    reference = write_gguf_of("gpt_oss", tmp_path / "tiny.gguf")
    model = native(tmp_path / "tiny.gguf", quantization="gguf")
    assert [weight.format for weight in model.layers[0].mlp.packed] == ["f32", "int4", "int4"]
    assert model.config.sinks == (True, True)
    assert_logits_equal(reference, model)


def test_the_published_config() -> None:
    """The config of gpt-oss-20b, without its quantisation."""
    published = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    }
    config = config_from_hf(published)
    assert config.windows == (128, 0) * 12
    assert (config.experts.count, config.experts.size, config.experts.routing.top_k) == (32, 2880, 4)
    assert (config.experts.clamp.alpha, config.experts.clamp.limit) == (1.702, 7.0)
    assert (config.rope.theta, config.rope.factor, config.rope.truncate) == (150000, 32.0, False)
    named = {"layer_types", "rope_scaling", "rope_theta", "sliding_window", "head_dim", "rms_norm_eps"}
    bare = {name: value for name, value in published.items() if name not in named}
    assert config_from_hf(bare) == config
