"""Models whose code is in transformers compute on our KV pages what the library computes itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.runtime.config import EngineConfig
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.gguf.config import ARCHITECTURES
from ramify.runtime.model.loading.load import check_transformers, dummy_model, load_model, read_shape
from ramify.runtime.model.shape.config import Family, ModelConfig
from ramify.runtime.model.transformers.trace import shape_of
from tests.model.architectures import save_tiny, tiny_config
from tests.model.checkpoints import change, change_tensors
from tests.model.equality import assert_engine_equal, assert_logits_equal, loaded
from tests.model.own_families import FAMILIES

DENSE = [
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "opt",
    "phi",
    "stablelm",
    "starcoder2",
    "cohere",
    "cohere2",
    "olmo",
    "olmo3",
]
DENSE += ["glm4", "nemotron", "exaone4", "ernie4_5", "seed_oss", "gemma4_text", "diffllama", "minicpm3"]
SINKS = ["gpt_oss", "granitemoe_swa"]
MOE = ["qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "granitemoe", "glm4_moe", "glm4_moe_lite", "deepseek_v3"]
OURS = ["llama", "gemma2"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("model_type", DENSE + MOE + OURS + SINKS)
def test_equal_to_transformers(model_type: str, tmp_path: Path) -> None:
    """Logits of packed chunks, and the tokens of the whole engine."""
    reference = save_tiny(tiny_config(model_type), tmp_path)
    model = loaded(tmp_path)
    assert_logits_equal(reference, model)
    assert_engine_equal(reference, model)


REFUSED = {
    "mamba": "layers of the type 'linear_attention'",
    "jamba": "layers of the type 'linear_attention'",
    "qwen3_next": "layers of the type 'linear_attention'",
    "lfm3": "layers of the type 'conv'",
    "llama4_text": "layers of the type 'chunked_attention'",
    "deepseek_v32": "layers of the type 'indexed_attention'",
    "rwkv": "joins tokens outside of attention",
    "bart": "encoder-decoder",
    "bloom": "does not go through transformers' attention interface",
    "ctrl": "takes no position_ids",
    "bert": "neither causal nor a sliding window",
    "moshi": "cache has a sliding window and its mask has none",
    "doge": "an attention mask of its own",
    "jetmoe": "reads values of the batch on the host",
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_pages_cannot_hold_is_refused_without_weights(model_type: str, tmp_path: Path) -> None:
    tiny_config(model_type).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedField, match=f"of transformers cannot run .*{REFUSED[model_type]}"):
        read_shape(tmp_path)


def test_windows_scales_and_caps_are_traced() -> None:
    shape = shape_of(tiny_config("gemma2"))
    assert shape.windows == (8, 0)
    assert shape.attention_soft_cap == 50.0
    assert shape.score_scale == 256**-0.5
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (2, 4, 2, 16)
    assert (shape.vocab_size, shape.context_length, shape.eos_token_ids) == (320, 512, (256,))


def test_layers_that_differ_are_padded_to_one_kind_of_page() -> None:
    shape = shape_of(tiny_config("gemma4_text"))
    assert [call.key_dim for call in shape.calls] == [16, 32]
    assert shape.head_dim == 32
    latent = shape_of(tiny_config("deepseek_v3"))
    assert (latent.calls[0].key_dim, latent.calls[0].value_dim, latent.head_dim) == (32, 16, 32)


def test_our_own_code_comes_first(tmp_path: Path) -> None:
    save_tiny(tiny_config("llama"), tmp_path)
    assert isinstance(read_shape(tmp_path), ModelConfig)
    assert isinstance(read_shape(tmp_path, "native"), ModelConfig)
    assert not isinstance(read_shape(tmp_path, "transformers"), ModelConfig)
    change(tmp_path, hidden_act="gelu")  # which our Llama does not have
    assert not isinstance(read_shape(tmp_path), ModelConfig)
    with pytest.raises(UnsupportedField, match="hidden_act"):
        read_shape(tmp_path, "native")


def test_refusals_by_name(tmp_path: Path) -> None:
    save_tiny(tiny_config("olmo"), tmp_path)
    with pytest.raises(UnsupportedField, match="model_type = 'olmo'") as refused:
        read_shape(tmp_path, "native")
    assert "--model-impl at auto" in (refused.value.remedy or "")
    with pytest.raises(UnsupportedField, match="does not read GGUF"):
        read_shape(tmp_path / "model.gguf", "transformers")
    change(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(UnsupportedField, match=r"OlmoForCausalLM .* quantised \(awq\)"):
        read_shape(tmp_path)
    change(tmp_path, model_type="unheard_of", quantization_config=...)
    with pytest.raises(UnsupportedField, match=r"transformers does not know .*unheard_of"):
        read_shape(tmp_path)
    for option in ({"deterministic": True}, {"quantization": "int8"}, {"cuda_graphs": True}):
        with pytest.raises(UnsupportedField, match=next(iter(option))):
            check_transformers(EngineConfig(**option))
    assert check_transformers(EngineConfig()).deterministic is False, "the products are torch's"


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    save_tiny(tiny_config("olmo"), tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    lost = load_file(tmp_path / "model.safetensors")[name]
    change_tensors(tmp_path, **{name: None})
    with pytest.raises(InvalidRequest, match=f"OlmoForCausalLM lacks: {name}"):
        loaded(tmp_path)
    change_tensors(tmp_path, **{name: lost, "extra": lost.clone()})
    with pytest.raises(InvalidRequest, match="does not: extra"):
        loaded(tmp_path)
    change_tensors(tmp_path, **{name: lost[1:].clone(), "extra": None})
    with pytest.raises(InvalidRequest, match="has tensors of other shapes: "):
        loaded(tmp_path)


def test_dummy_weights_and_bfloat16(tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe")
    config.save_pretrained(tmp_path)
    shape = read_shape(tmp_path, "transformers")
    first, second = (dummy_model(shape, dtype=torch.bfloat16, seed=3) for _ in "ab")
    weights = dict(second.named_parameters())
    assert weights
    for name, parameter in first.named_parameters():
        assert parameter.dtype == torch.bfloat16
        torch.testing.assert_close(parameter, weights[name], atol=0, rtol=0)


def test_a_shorter_context(tmp_path: Path) -> None:
    save_tiny(tiny_config("olmo"), tmp_path)
    files = ModelFiles(name="tiny", weights=tmp_path, tokenizer=tmp_path)
    assert load_model(files, dtype=torch.float32, context_length=64).config.context_length == 64


@pytest.mark.slow
def test_the_page_says_what_is_refused() -> None:
    """The page's tables are checked by the runs that wrote them; here only that nothing moved between
    them."""
    page = (Path(__file__).parent.parent.parent / "docs" / "models.md").read_text()
    own, others = page.partition("<!-- models:")[2].split("| family by transformers' code |")
    served, refused = others.split("| refused, because | families |")
    rows = re.findall(r"^\| (\w+) \| (yes.*) \|$", own, re.MULTILINE)
    assert [name for name, _ in rows] == list(get_args(Family))
    for name, cells in rows:
        gguf = FAMILIES[name].gguf.architecture in ARCHITECTURES
        assert cells.split(" | ")[2] == ("yes" if gguf else "refused: `general.architecture`")
    for name in re.findall(r"^\| (\w[\w-]*) \| \w+ \|", served, re.MULTILINE):
        shape_of(tiny_config(name))
    for reason, names in re.findall(r"^\| (\w.+) \| (.+) \|$", refused, re.MULTILINE):
        for name in names.split(", "):
            with pytest.raises(UnsupportedField, match=re.escape(reason)):
                shape_of(tiny_config(name))
