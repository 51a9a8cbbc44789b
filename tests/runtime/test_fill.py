"""Filling in the middle: the ids of a prompt by family, against the strings that each family documents."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ramify.engine_messages import Tokenize
from ramify.errors import UnsupportedField
from ramify.fill import Fill
from ramify.messages import Generate
from ramify.runtime.processes.tokenizer import PromptTokenizer
from ramify.sampling_params import SamplingParams

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def byte_level(*special: str, bos: str = "") -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, in which two line feeds are one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: token for token, char in enumerate([*alphabet, "ĊĊ"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return finished(tokenizer, special, bos)


def sentence_piece(*special: str) -> PreTrainedTokenizerFast:
    """A tokenizer that puts a space before a text, as Llama 2's does."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS]
    model = models.BPE(
        vocab={piece: token for token, piece in enumerate(pieces)},
        merges=[],
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return finished(tokenizer, special, "<s>")


def finished(tokenizer: Tokenizer, special: tuple[str, ...], bos: str) -> PreTrainedTokenizerFast:
    names = [name for name in (bos, *special) if name]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos or None)


def tokens(tokenizer: Any, prefix: str, fill: Fill, **metadata: int) -> str:
    prompts = PromptTokenizer(tokenizer, metadata={f"tokenizer.ggml.{k}": v for k, v in metadata.items()})
    request = Generate(rid="r", prompt=(prefix,), fill=fill)
    ids = prompts.submit(request).ids
    assert prompts.tokenize(Tokenize(rid="r", prompts=(request,), special=True)).prompts[0].ids == ids
    return "".join(tokenizer.convert_ids_to_tokens(ids)).replace("Ċ", "\n").replace("Ġ", " ")


QWEN = (
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|endoftext|>",
)
STARCODER = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<repo_name>", "<file_sep>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
CODELLAMA = ("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>")
MISTRAL = ("[PREFIX]", "[MIDDLE]", "[SUFFIX]")


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (byte_level(*QWEN), "<|fim_prefix|>ab\n<|fim_suffix|>\ncd<|fim_middle|>"),
        (byte_level(*STARCODER), "<fim_prefix>ab\n<fim_suffix>\ncd<fim_middle>"),
        (byte_level(*STARCODER[:3]), "<fim_prefix>ab\n<fim_suffix>\ncd<fim_middle>"),  # Granite
        (
            byte_level(*DEEPSEEK, bos="<｜begin▁of▁sentence｜>"),
            "<｜begin▁of▁sentence｜><｜fim▁begin｜>ab\n<｜fim▁hole｜>\ncd<｜fim▁end｜>",
        ),
        (sentence_piece(*CODELLAMA), "<s>▁<PRE>▁ab<0x0A>▁<SUF><0x0A>cd▁<MID>"),
        (sentence_piece(*MISTRAL), "<s>[SUFFIX]<0x0A>cd[PREFIX]▁ab<0x0A>"),
        (byte_level(*MISTRAL, bos="<s>"), "<s>[SUFFIX]\ncd[PREFIX]ab\n"),
    ],
    ids=["qwen", "starcoder", "granite", "deepseek", "codellama", "mistral", "codestral-tekken"],
)
def test_the_documented_order(tokenizer: Any, expected: str) -> None:
    assert tokens(tokenizer, "ab\n", Fill("\ncd")) == expected


def test_a_gguf_file_names_the_tokens() -> None:
    tokenizer = byte_level("<a>", "<b>", "<c>")
    a, b, c = tokenizer.convert_tokens_to_ids(["<a>", "<b>", "<c>"])
    new = {"fim_pre_token_id": a, "fim_suf_token_id": b, "fim_mid_token_id": c}
    old = {"prefix_token_id": c, "suffix_token_id": b, "middle_token_id": a}
    assert tokens(tokenizer, "x", Fill("y"), **new) == "<a>x<b>y<c>"
    assert tokens(tokenizer, "x", Fill("y"), **old) == "<c>x<b>y<a>"
    assert tokens(tokenizer, "x", Fill("y"), **old, **new) == "<a>x<b>y<c>"


def test_other_files_come_first() -> None:
    files = (("a.py", "a\n"), ("b.py", "b\n"))
    assert tokens(byte_level(*QWEN), "x", Fill("y", files)) == (
        "<|repo_name|>myproject\n<|file_sep|>a.py\na\n<|file_sep|>b.py\nb\n<|file_sep|>filename\n"
        "<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>"
    )
    assert tokens(byte_level(*DEEPSEEK), "x", Fill("y", files)) == (
        "\n\n--- snippet ---\n\na\n\n\n--- snippet ---\n\nb\n<｜fim▁begin｜>x<｜fim▁hole｜>y<｜fim▁end｜>"
    )


def test_the_middle_ends_at_the_familys_tokens() -> None:
    tokenizer = sentence_piece(*CODELLAMA)
    prompts = PromptTokenizer(tokenizer)

    def stops(**options: Any) -> tuple[int, ...]:
        sampling = SamplingParams(**options)
        submit = prompts.submit(Generate(rid="r", prompt=("a",), fill=Fill("b"), sampling=sampling))
        assert not submit.open_end
        return submit.sampling.stop_token_ids

    assert {7, tokenizer.convert_tokens_to_ids("▁<EOT>")} < {*stops(stop_token_ids=(7,))}
    assert stops(ignore_eos=True) == ()


def test_a_model_without_the_tokens_is_refused_by_their_names() -> None:
    for present, missing in (
        ((), "<|fim_prefix|>, <|fim_suffix|>, <|fim_middle|>"),
        (STARCODER[:2], "<fim_suffix>"),
    ):
        with pytest.raises(UnsupportedField, match=f"lacks {missing.replace('|', '.')} and") as error:
            tokens(byte_level(*present), "a", Fill("b"))
        assert error.value.field == "suffix"
