"""The pre-tokenizers of byte-level tokenizers, by llama.cpp's names. `tokenizer` reads files by them,
`quantize.gguf_vocabulary` writes files by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, pre_tokenizers

from ramify.errors import UnsupportedField

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES


def _cased(ending: str, digits: str) -> str:
    """Words with an upper-case beginning: o200k's and Tekken's pattern."""
    return rf"{_WORD}{_UPPER}*{_LOWER}+{ending}|{_WORD}{_UPPER}+{_LOWER}*{ending}|{digits}|{_REST}"


class Rule(NamedTuple):
    """A way of splitting texts into pieces before the merges."""

    names: tuple[str, ...]
    """Values of `tokenizer.ggml.pre` that name the rule. Files are written with the first."""
    patterns: tuple[str, ...]
    """The patterns that split a text, one after the other."""
    ignore_merges: bool = False
    """Whether a piece that is a token is taken without merges."""


RULES = (
    Rule(
        (
            *("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "exaone4", "granite-docling", "mellum"),
            *("gigachat", "a.x-4.0", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"),
        ),
        (GPT2,),
    ),
    Rule(
        ("smollm", "refact", "starcoder", "command-r", "codeshell", "exaone", "minerva-7b"), (r"\p{N}", GPT2)
    ),
    Rule(
        (
            *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
            "jina-v5-nano",
        ),
        (_LLAMA3,),
        ignore_merges=True,
    ),
    Rule(("glm4", "chatglm-bpe", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    Rule(
        (
            *("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"),
            *("stablelm2", "hunyuan", "grok-2"),
        ),
        (_LLAMA3.replace("{1,3}", ""),),
    ),
    Rule(("qwen35",), (_QWEN35,)),
    Rule(("tekken",), (_cased("", r"\p{N}"),), ignore_merges=True),
    Rule(
        ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), (_cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),)
    ),
    Rule(("default",), (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
)
"""The rules of llama.cpp (`llama_vocab::impl::load`). They are a table here, since the one of transformers
lacks some, differs between its versions, and takes any other name for GPT-2's."""


def rule_of(metadata: Mapping[str, Any]) -> Rule | None:
    """The rule of a GGUF file; None for a vocabulary that is no byte-level BPE. A file without a name has the
    rule "default", as in llama.cpp.

    Raises `UnsupportedField` for an unknown name.
    """
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        return None
    name = metadata.get("tokenizer.ggml.pre", "default")
    for rule in RULES:
        if name in rule.names:
            return rule
    raise UnsupportedField(
        f"The GGUF file has tokenizer.ggml.pre = {name!r}, a way of splitting texts that is not known here.",
        field="model",
        remedy="Use the model's safetensors folder.",
    )


def set_pre_tokenizer(tokenizer: Tokenizer, rule: Rule) -> None:
    """Split texts by `rule`."""
    tokenizer.model.ignore_merges = rule.ignore_merges
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
