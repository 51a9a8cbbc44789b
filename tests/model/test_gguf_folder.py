"""`ramify quantize` writes a folder of safetensors as a GGUF file that computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.constants import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES
from gguf.quants import dequantize, quantize
from transformers import PreTrainedTokenizerFast

from ramify.cli.main import FAILED, main
from ramify.errors import UnsupportedField
from ramify.runtime.model.gguf.header import read_header
from ramify.runtime.model.gguf.pre_tokenizers import GPT2, PRE_TOKENIZERS
from ramify.runtime.model.gguf.tokenizer import convert_tokenizer
from ramify.runtime.model.loading.load import read_config
from ramify.runtime.quantize.folder import write_folder
from ramify.runtime.quantize.gguf_file import write_gguf
from ramify.runtime.quantize.gguf_vocabulary import tokenizer_metadata
from ramify.runtime.quantize.quality import TEXT

from .checkpoints import change
from .equality import assert_logits_equal, native
from .own_families import FAMILIES, reference_of
from .small_tokenizers import DIGITS, TEMPLATE, splits, write_byte_level, write_sentencepiece

NOT_READ = ("phi3", "smollm3", "olmo2")
QUICK = ("llama", "gemma3", "qwen3_moe")
"""A family with rotary pairs as neighbours, one with two rotary embeddings, one with experts."""
CASES: list[tuple[str, dict[str, Any]]] = [
    *((family, own.gguf.options) for family, own in FAMILIES.items() if family not in NOT_READ),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}}),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16.0,
            }
        },
    ),
]


def folder_of(family: Any, folder: Path, **options: Any) -> Any:
    """A checkpoint with a tokenizer in `folder`; returns transformers' model."""
    reference = reference_of(family, folder, **options)
    write_byte_level(folder)
    return reference


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param(
            *case, marks=[] if place == 0 or case[0] in QUICK else pytest.mark.slow, id=f"{case[0]}-{place}"
        )
        for place, case in enumerate(CASES)
    ],
)
def test_logits_of_the_file_equal_the_folders(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    reference, path = folder_of(family, tmp_path / "in", **options), tmp_path / "out.gguf"
    write_gguf(tmp_path / "in", path, "f32")
    assert_logits_equal(reference, native(path))
    header = read_header(path)
    architecture = header.metadata["general.architecture"]
    found = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    known = {TENSOR_NAMES[tensor].rpartition(".")[2] for tensor in MODEL_TENSORS[found]}
    assert {name.split(".")[2 if name.startswith("blk.") else 0] for name in header.tensors} <= known


def test_matrices_are_quantised_and_vectors_are_float32(tmp_path: Path) -> None:
    folder_of("qwen3_moe", tmp_path / "in", moe_intermediate_size=32)
    model = reference_of("qwen3_moe", moe_intermediate_size=32).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "in")
    write_gguf(tmp_path / "in", tmp_path / "exact.gguf", "bf16")
    write_gguf(tmp_path / "in", tmp_path / "out.gguf", "q4_1")
    exact = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "exact.gguf").tensors}
    kinds = {}
    for tensor in GGUFReader(tmp_path / "out.gguf").tensors:
        kinds[tensor.name.removeprefix("blk.0.")] = tensor.tensor_type.name
        values = dequantize(exact[tensor.name].data, exact[tensor.name].tensor_type)
        wanted = quantize(values.reshape(-1, values.shape[-1]), tensor.tensor_type)
        np.testing.assert_array_equal(tensor.data.reshape(wanted.shape), wanted)
    assert exact["blk.0.attn_q.weight"].tensor_type == GGMLQuantizationType.BF16
    assert kinds["attn_q.weight"] == kinds["ffn_down_exps.weight"] == "Q4_1"
    assert kinds["token_embd.weight"] == kinds["output.weight"] == "Q8_0"
    assert kinds["attn_norm.weight"] == kinds["ffn_gate_inp.weight"] == "F32"


def test_the_file_says_what_the_folder_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_of("llama", tmp_path / "in", eos_token_id=[256, 7], bos_token_id=3)
    command = ["quantize", str(tmp_path / "in"), str(tmp_path / "out.gguf"), "--to", "bf16", "--check"]
    assert main(command) == 0
    assert "same most likely token" in capsys.readouterr().out
    config = read_config(tmp_path / "out.gguf")
    assert set(config.eos_token_ids) == {256, 7}
    assert config.bos_token_id == 3
    assert config.context_length == read_config(tmp_path / "in").context_length
    metadata = read_header(tmp_path / "out.gguf").metadata
    assert metadata["general.name"] == "in"
    assert metadata["tokenizer.chat_template"] == TEMPLATE
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    assert main(["quantize", str(tmp_path / "out.gguf"), str(tmp_path / "folder")]) == FAILED
    assert "Name a .gguf file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "options", "problem"),
    [
        ("phi3", {}, "phi3, whose GGUF files are not read"),
        ("qwen2", {}, "windows = "),
        ("gpt_oss", {"swiglu_limit": 0.7}, "experts = "),
        ("qwen2_moe", {}, "qwen2moe have no name for model.layers.0.mlp"),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 128,
                }
            },
            "has rope, which",
        ),
        ("llama", {"eos_token_id": [1, 2, 3, 4]}, "eos_token_ids"),
    ],
)
def test_what_gguf_files_cannot_say_is_refused(
    family: str, options: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    folder_of(family, tmp_path / "in", **options)
    with pytest.raises(UnsupportedField, match=problem):
        write_gguf(tmp_path / "in", tmp_path / "out.gguf", "q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_quantised_folder_is_refused(tmp_path: Path) -> None:
    folder_of("llama", tmp_path / "in")
    write_folder(tmp_path / "in", tmp_path / "int4", "int4")
    with pytest.raises(UnsupportedField, match="quantised already"):
        write_gguf(tmp_path / "int4", tmp_path / "out.gguf", "q8_0")


TEXTS = [
    TEXT.read_text(encoding="utf-8"),
    "x =  12 + 3\n   4 years, 1234567.89\n\n\t\t 5",
    "I've 'told he's there, 'RE you sure? We'Ve a'lL",
    "naïve — 日本語 🙂 нещо",
    "<|user|>hi<|end|><think> so</think>",
    " leading, trailing  ",
]
"""Digits behind spaces, contractions in both cases, other scripts, special tokens, spaces at the ends."""


def assert_tokens_come_along(folder: Path, path: Path) -> None:
    write_gguf(folder, path, "f32")
    convert_tokenizer(path, path.parent / "read")
    wanted, found = (
        PreTrainedTokenizerFast.from_pretrained(place) for place in (folder, path.parent / "read")
    )
    for text in TEXTS:
        ids = wanted(text).input_ids
        assert found(text).input_ids == ids
        assert found.decode(ids) == wanted.decode(ids)
    assert found.chat_template == TEMPLATE
    assert (found.bos_token, found.eos_token) == (wanted.bos_token, wanted.eos_token)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_byte_level_tokenizers_come_along(name: str, tmp_path: Path) -> None:
    reference_of("qwen3", tmp_path / "in", vocab_size=640, bos_token_id=600, eos_token_id=602)
    patterns, ignore_merges = PRE_TOKENIZERS[name]
    pre = DIGITS if name == "smollm" else splits(patterns[-1])
    write_byte_level(tmp_path / "in", pre, size=600, ignore_merges=ignore_merges)
    assert_tokens_come_along(tmp_path / "in", tmp_path / "out.gguf")
    assert read_header(tmp_path / "out.gguf").metadata["tokenizer.ggml.pre"] == name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_sentencepiece_vocabularies_come_along(family: Any, tmp_path: Path) -> None:
    write_sentencepiece(tmp_path / "in", prefix=family == "llama")
    begin, end = (
        PreTrainedTokenizerFast.from_pretrained(tmp_path / "in").convert_tokens_to_ids(token)
        for token in ("<s>", "<|end|>")
    )
    reference_of(family, tmp_path / "in", vocab_size=640, bos_token_id=begin, eos_token_id=end)
    assert_tokens_come_along(tmp_path / "in", tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("pattern", "problem"), [(r"\w+", r"pre_tokenizer = .*w\+"), (GPT2 + "|x", "pre_tokenizer")]
)
def test_a_pre_tokenizer_without_a_name_is_refused(pattern: str, problem: str, tmp_path: Path) -> None:
    reference_of("llama", tmp_path / "in")
    write_byte_level(tmp_path / "in", splits(pattern))
    with pytest.raises(UnsupportedField, match=problem):
        tokenizer_metadata(tmp_path / "in", read_config(tmp_path / "in"))


def test_more_tokens_than_logits_are_refused(tmp_path: Path) -> None:
    folder_of("llama", tmp_path / "in")
    change(tmp_path / "in", vocab_size=200)
    with pytest.raises(UnsupportedField, match="a token of the id = 303"):
        tokenizer_metadata(tmp_path / "in", read_config(tmp_path / "in"))
