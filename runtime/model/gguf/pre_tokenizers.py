"""The pre-tokenizers of byte-level tokenizers, by llama.cpp's names. `tokenizer` reads files by them,
`quantize.gguf_vocabulary` writes files by them."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, pre_tokenizers

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


PRE_TOKENIZERS: dict[str, tuple[tuple[str, ...], bool]] = {
    "gpt-2": ((GPT2,), False),
    "smollm": ((r"\p{N}", GPT2), False),
    "llama-bpe": ((_LLAMA3,), True),
    "glm4": ((_LLAMA3,), False),
    "qwen2": ((_LLAMA3.replace("{1,3}", ""),), False),
    "qwen35": ((_QWEN35,), False),
    "tekken": ((_cased("", r"\p{N}"),), True),
    "gpt-4o": ((_cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),), False),
}
"""`tokenizer.ggml.pre` → (the patterns that split a text, one after the other; whether a piece that is a
token is taken without merges). Of several names for one rule, that of a family which is read here."""


def set_pre_tokenizer(tokenizer: Tokenizer, name: str) -> None:
    """Split texts as llama.cpp's pre-tokenizer `name` does, if it is one of `PRE_TOKENIZERS`."""
    if name in PRE_TOKENIZERS:
        patterns, tokenizer.model.ignore_merges = PRE_TOKENIZERS[name]
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
