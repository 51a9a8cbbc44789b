"""Prompts that let a model fill in the middle: between a prefix and a suffix, in the form of its training.

    Qwen2.5-Coder, StarCoder2, Granite    <prefix> before <suffix> after <middle>
    CodeLlama                             BOS ▁<PRE> before ▁<SUF> after ▁<MID>
    DeepSeek-Coder                        BOS <｜fim▁begin｜> before <｜fim▁hole｜> after <｜fim▁end｜>
    Codestral, Mistral                    BOS [SUFFIX] after [PREFIX] before

Other files come before, as llama.cpp's ``/infill`` writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ramify.errors import UnsupportedField
from ramify.fill import Fill

_FAMILIES: tuple[tuple[str, ...], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("[PREFIX]", "[SUFFIX]"),
)
"""The tokens for prefix, suffix and middle. Without one for the middle, the suffix comes first."""
_FILES = ("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<|filename|>", "<filename>")
_REPOSITORIES = ("<|repo_name|>", "<repo_name>", "<|reponame|>", "<reponame>")
_ENDS = (
    *_FILES,
    *_REPOSITORIES,
    "▁<EOT>",
    "<|endoftext|>",
    "<｜end▁of▁sentence｜>",
    "<|fim_pad|>",
    "<fim_pad>",
)
"""Tokens behind which the middle is over."""

_GGUF = (
    ("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"),
    ("prefix_token_id", "suffix_token_id", "middle_token_id"),  # files from before 2024-10
)

Encode = Callable[[str], list[int]]


class FillFormat(NamedTuple):
    """Token ids. `middle` None: the suffix comes first."""

    prefix: int
    suffix: int
    middle: int | None
    file: int | None
    """The token before the name of a file. `repository`: that before the name of the repository."""
    repository: int | None
    ends: tuple[int, ...]

    def ids(self, prefix: str, fill: Fill, encode: Encode, encode_inside: Encode) -> list[int]:
        """The prompt, without a beginning-of-sequence token. `encode_inside` encodes without the space that
        some tokenizers put before a text."""
        before = [self.prefix, *encode(prefix)]
        after = [self.suffix, *encode_inside(fill.suffix)]
        parts = [*after, *before] if self.middle is None else [*before, *after, self.middle]
        return [*self._files(fill, encode_inside), *parts]

    def _files(self, fill: Fill, encode: Encode) -> list[int]:
        if not fill.files:
            return []
        if self.file is None:
            return encode("".join(f"\n\n--- snippet ---\n\n{text}" for _, text in fill.files))
        ids = [] if self.repository is None else [self.repository, *encode("myproject\n")]
        for name, text in fill.files:
            ids += [self.file, *encode(f"{name}\n{text}")]
        return [*ids, self.file, *encode("filename\n")]


def fill_format(tokenizer: Any, metadata: Mapping[str, Any]) -> FillFormat:
    """The format by `metadata` of a GGUF file, else by the tokenizer's special tokens.

    Raises `UnsupportedField` with the tokens that are missing.
    """

    def ids_of(names: tuple[str, ...]) -> list[int]:
        found = [(name, tokenizer.convert_tokens_to_ids(name)) for name in names]
        return [
            token
            for name, token in found
            if token is not None and tokenizer.convert_ids_to_tokens(token) == name
        ]

    file, repository = (next(iter(ids_of(names)), None) for names in (_FILES, _REPOSITORIES))
    told: list[list[Any]] = [[metadata.get(f"tokenizer.ggml.{key}") for key in keys] for keys in _GGUF]
    told += [ids if len(ids := ids_of(names)) == len(names) else [None] for names in _FAMILIES]
    marks = next((ids for ids in told if None not in ids), None)
    if marks is None:
        nearest = max(_FAMILIES, key=lambda names: len(ids_of(names)))
        missing = [name for name in nearest if not ids_of((name,))]
        raise UnsupportedField(
            f"This model cannot fill in the middle: its tokenizer lacks {', '.join(missing)}"
            " and the tokens that other families have for it.",
            field="suffix",
            remedy="Serve a model that was trained for it, such as Qwen2.5-Coder.",
        )
    prefix, suffix, *middle = marks
    ends = (*marks, *ids_of(_ENDS))
    return FillFormat(prefix, suffix, middle[0] if middle else None, file, repository, ends)
