"""`ramify quantize` writes a folder of safetensors as a GGUF file that computes the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.constants import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from ramify.cli.main import FAILED, main
from ramify.errors import UnsupportedField
from ramify.runtime.model.gguf.header import read_header
from ramify.runtime.model.gguf.pre_tokenizers import GPT2, RULES, Rule, rule_of, set_pre_tokenizer
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
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.names[0])
def test_byte_level_tokenizers_come_along(rule: Rule, tmp_path: Path) -> None:
    reference_of("qwen3", tmp_path / "in", vocab_size=640, bos_token_id=600, eos_token_id=602)
    pre = DIGITS if "smollm" in rule.names else splits(*rule.patterns)
    write_byte_level(tmp_path / "in", pre, size=600, ignore_merges=rule.ignore_merges)
    assert_tokens_come_along(tmp_path / "in", tmp_path / "out.gguf")
    assert read_header(tmp_path / "out.gguf").metadata["tokenizer.ggml.pre"] == rule.names[0]


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


def begin_each_text(parts: dict[str, Any]) -> None:
    """Let the tokenizer add <s> before each text."""
    ids = {token["content"]: token["id"] for token in parts["added_tokens"]}
    single = [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    special = {"<s>": {"id": "<s>", "ids": [ids["<s>"]], "tokens": ["<s>"]}}
    parts["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single,
        "special_tokens": special,
    }


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "tokenizer.json"
    parts = json.loads(path.read_text())
    change(parts)
    path.write_text(json.dumps(parts))


@pytest.mark.parametrize("bos_token_id", [3, 300])
def test_a_first_token_that_the_tokenizer_adds_comes_along(bos_token_id: int, tmp_path: Path) -> None:
    reference_of("llama", tmp_path / "in", bos_token_id=bos_token_id, eos_token_id=302, vocab_size=640)
    write_byte_level(tmp_path / "in")
    edit(tmp_path / "in", begin_each_text)
    if bos_token_id == 3:  # the file has one key for both
        with pytest.raises(UnsupportedField, match="bos_token_id = 3"):
            write_gguf(tmp_path / "in", tmp_path / "out.gguf", "q8_0")
        return
    assert_tokens_come_along(tmp_path / "in", tmp_path / "out.gguf")
    metadata = read_header(tmp_path / "out.gguf").metadata
    assert (metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.add_bos_token"]) == (300, True)


def each_added(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda parts: [token.update(fields) for token in parts["added_tokens"]]


def no_bytes(parts: dict[str, Any]) -> None:
    parts["pre_tokenizer"] = None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (each_added(lstrip=True), "splits 'a <s>b<s> c' into"),
        (each_added(rstrip=True), "splits 'a <s>b<s> c' into"),
        (each_added(single_word=True), "splits 'a <s>b<s> c' into"),
        (lambda parts: parts["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"), "splits"),
        (lambda parts: parts["model"].update(dropout=0.5), "splits"),
        (lambda parts: parts.update(normalizer={"type": "Lowercase"}), "normalizer = "),
        (no_bytes, "no ByteLevel pre_tokenizer"),
    ],
)
def test_a_tokenizer_that_the_file_cannot_say_is_refused(
    change: Callable[[dict[str, Any]], object], problem: str, tmp_path: Path
) -> None:
    reference_of("llama", tmp_path / "in")
    write_byte_level(tmp_path / "in", splits(*RULES[0].patterns))
    edit(tmp_path / "in", change)
    with pytest.raises(UnsupportedField, match=problem):
        write_gguf(tmp_path / "in", tmp_path / "out.gguf", "q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_the_rules_are_those_of_transformers() -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    ours = {name: rule.patterns for rule in RULES for name in rule.names}
    assert len(ours) == sum(len(rule.names) for rule in RULES)
    theirs = {name: (pattern,) for name, pattern in mapping.GGUF_PRE_TOKENIZER_SPLITS.items()}
    assert theirs == {name: patterns for name, patterns in ours.items() if name in theirs}


def test_names_of_a_rule(tmp_path: Path) -> None:
    def read(**fields: str) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE())
        metadata = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
        rule = rule_of(metadata)
        assert rule is not None
        set_pre_tokenizer(tokenizer, rule)
        return tokenizer

    def pieces(pre: str) -> list[str]:
        found = read(model="gpt2", pre=pre).pre_tokenizer
        assert found is not None
        return [piece for piece, _ in found.pre_tokenize_str("x =  12")]

    assert pieces("refact") == pieces("smollm") == ["x", "Ġ=", "ĠĠ", "1", "2"]  # Granite's files say refact
    assert pieces("olmo") == pieces("gpt-2") == ["x", "Ġ=", "Ġ", "Ġ12"]
    assert read(model="gpt2", pre="falcon3").model.ignore_merges
    assert not read(model="gpt2", pre="smaug-bpe").model.ignore_merges
    assert rule_of({"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "unknown"}) is None
    writer = GGUFWriter(tmp_path / "out.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("deepseek-llm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedField, match=r"tokenizer\.ggml\.pre = 'deepseek-llm'"):
        convert_tokenizer(tmp_path / "out.gguf", tmp_path / "read")


def test_more_tokens_than_logits_are_refused(tmp_path: Path) -> None:
    folder_of("llama", tmp_path / "in")
    change(tmp_path / "in", vocab_size=200)
    with pytest.raises(UnsupportedField, match="a token of the id = 303"):
        tokenizer_metadata(tmp_path / "in", read_config(tmp_path / "in"))
