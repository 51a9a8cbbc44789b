"""A tokenizer.json as the metadata of a GGUF file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf.constants import TokenType

from ramify.errors import UnsupportedField
from ramify.runtime.model.gguf.pre_tokenizers import GPT2, RULES
from ramify.runtime.model.gguf.tokenizer import read_tokenizer
from ramify.runtime.model.shape.config import ModelConfig
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer
from ramify.runtime.quantize.gguf_metadata import Metadata
from ramify.runtime.quantize.quality import TEXT

_SPACE = "▁"
_TEXTS = (
    " leading, trailing  ",
    "x =  12 + 3\n   4 years, 1234567.89\n\n\t\t 5",
    "I'VE 'told he's",
    "日本語 🙂 нещо",
)
_WRITTEN = ", ".join(rule.names[0] for rule in RULES)
_REMEDY = "Write a folder: --to int8 or int4, and an out without .gguf."


def tokenizer_metadata(folder: Path, config: ModelConfig) -> Metadata:
    """The keys `tokenizer.*` for the tokenizer in `folder`.

    Raises `UnsupportedField`, with the name of the part, for a tokenizer that is neither byte-level BPE nor a
    sentencepiece vocabulary, or whose pre-tokenizer llama.cpp has no name for.
    """
    loaded = load_tokenizer(folder)
    backend = loaded.backend_tokenizer
    parts: dict[str, Any] = json.loads(backend.to_str())
    model = parts["model"]
    if model["type"] != "BPE":
        raise _unsupported("model.type", model["type"], "BPE")
    is_byte_level = any(part["type"] == "ByteLevel" for part in _flat(parts["pre_tokenizer"]))
    found = _byte_level(parts) if is_byte_level else _sentencepiece(parts, config.vocab_size)
    tokens, types = _tokens(parts, config.vocab_size, is_byte_level)
    found |= {"ggml.tokens": tokens, "ggml.token_type": types}
    begin, end = loaded.bos_token_id, loaded.eos_token_id
    ids = loaded("a").input_ids
    begins = begin is not None and ids[:1] == [begin]
    ends = sorted(config.eos_token_ids, key=lambda token: token != end)
    found |= dict(zip(("ggml.eos_token_id", "ggml.eot_token_id", "ggml.eom_token_id"), ends, strict=False))
    found |= {
        # A reader adds the token of this id, so the tokenizer's goes before the config's.
        "ggml.bos_token_id": begin if begins or config.bos_token_id is None else config.bos_token_id,
        "ggml.unknown_token_id": loaded.unk_token_id,
        "ggml.padding_token_id": loaded.pad_token_id,
        "ggml.add_bos_token": begins,
        "ggml.add_eos_token": end is not None and ids[-1:] == [end],
        "chat_template": loaded.chat_template,
    }
    return {f"tokenizer.{key}": value for key, value in found.items() if value is not None}


def check_tokenizer(folder: Path, path: Path) -> None:
    """Raise `UnsupportedField` if the GGUF file `path` splits texts otherwise than the tokenizer in `folder`:
    for the parts of tokenizer.json that GGUF files have no key for."""
    wanted = load_tokenizer(folder)
    with tempfile.TemporaryDirectory() as read:
        read_tokenizer(path).save_pretrained(read)
        found = load_tokenizer(Path(read))
    added = [f"a {token}b{token} c" for token in wanted.get_added_vocab()]
    for text in (*TEXT.read_text(encoding="utf-8").splitlines(), *_TEXTS, *added):
        ours, theirs = (each.convert_ids_to_tokens(each(text).input_ids) for each in (wanted, found))
        if ours != theirs:
            raise UnsupportedField(
                f"The tokenizer splits {text!r:.200} into {ours!r:.300}. A GGUF file cannot say all of "
                f"tokenizer.json, and would split it into {theirs!r:.300}.",
                field="model",
                remedy=_REMEDY,
            )


def _unsupported(part: str, value: object, wanted: str) -> UnsupportedField:
    return UnsupportedField(
        f"tokenizer.json has {part} = {value!r:.300}, which GGUF files cannot say; {wanted} can be written.",
        field="model",
        remedy=_REMEDY,
    )


def _flat(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, without sequences."""
    if part is None:
        return
    inner = part.get("pretokenizers") or part.get("normalizers")
    if part["type"] != "Sequence":
        yield part
    for each in inner or ():
        yield from _flat(each)


def _byte_level(parts: Mapping[str, Any]) -> Metadata:
    for part in _flat(parts["normalizer"]):
        if part["type"] != "NFC":  # llama.cpp and its converter leave it out
            raise _unsupported("normalizer", part, "none, or NFC,")
    patterns = list[str]()
    for part in _flat(parts["pre_tokenizer"]):
        if part["type"] == "Digits" and part["individual_digits"]:
            patterns.append(r"\p{N}")
        elif part["type"] == "Split" and "Regex" in part["pattern"]:
            patterns.append(part["pattern"]["Regex"])
        elif part["type"] != "ByteLevel" or part["add_prefix_space"]:
            raise _unsupported("pre_tokenizer", part, _WRITTEN)
        elif part["use_regex"]:
            patterns.append(GPT2)
    ignore_merges = bool(parts["model"].get("ignore_merges"))
    alike = [rule for rule in RULES if rule.patterns == tuple(patterns)]
    if not alike:
        raise _unsupported("pre_tokenizer", parts["pre_tokenizer"], _WRITTEN)
    # Where merges are ignored in no rule of these patterns, or in each, `check_tokenizer` finds a difference.
    rule = next((rule for rule in alike if rule.ignore_merges == ignore_merges), alike[0])
    merges = [" ".join(pair) for pair in _merges(parts)]
    return {"ggml.model": "gpt2", "ggml.pre": rule.names[0], "ggml.merges": merges}


def _sentencepiece(parts: Mapping[str, Any], vocab_size: int) -> Metadata:
    """A vocabulary of sentencepiece's BPE, in which the score of a token orders the merges: minus the rank of
    its first merge."""
    model, prefix = parts["model"], False
    if not model.get("byte_fallback"):
        raise _unsupported(
            "no ByteLevel pre_tokenizer, and model.byte_fallback", model.get("byte_fallback"), "one of them"
        )
    for part in [*_flat(parts["normalizer"]), *_flat(parts["pre_tokenizer"])]:
        prefix |= part["type"] == "Prepend" or part.get("prepend_scheme", "never") != "never"
        if part["type"] not in ("Prepend", "Replace", "Metaspace", "Split"):
            raise _unsupported("a part", part, f"spaces as {_SPACE}, with a first one or without,")
    ranks: dict[str, int] = {}
    merges = {(left, right): rank for rank, (left, right) in enumerate(_merges(parts))}
    for (left, right), rank in merges.items():
        ranks.setdefault(left + right, rank)
    added = {token["content"] for token in parts["added_tokens"]}
    for token in model["vocab"]:
        for at in range(1, len(token)):
            pair = token[:at], token[at:]
            if all(half in model["vocab"] for half in pair) and pair not in merges and token not in added:
                raise _unsupported("model.merges without", pair, "every pair of tokens that is a token")
    scores = [-float(len(merges))] * vocab_size
    for token, rank in ranks.items():
        scores[model["vocab"][token]] = -float(rank)
    return {"ggml.model": "llama", "ggml.scores": scores, "ggml.add_space_prefix": prefix}


def _merges(parts: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    return [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in parts["model"]["merges"]]


def _ids(parts: Mapping[str, Any]) -> dict[str, int]:
    return parts["model"]["vocab"] | {token["content"]: token["id"] for token in parts["added_tokens"]}


def _tokens(parts: Mapping[str, Any], vocab_size: int, is_byte_level: bool) -> tuple[list[str], list[int]]:
    """Texts and types of the tokens, as many as the model has logits."""
    ids = _ids(parts)
    if max(ids.values()) >= vocab_size:
        raise _unsupported("a token of the id", max(ids.values()), f"ids below the vocabulary's {vocab_size}")
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [int(TokenType.UNUSED)] * vocab_size
    for token, index in ids.items():
        is_byte = not is_byte_level and len(token) == 6 and token.startswith("<0x")
        tokens[index], types[index] = token, int(TokenType.BYTE if is_byte else TokenType.NORMAL)
    for token in parts["added_tokens"]:
        types[token["id"]] = int(TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED)
    unknown = parts["model"].get("unk_token")
    if unknown in ids:
        types[ids[unknown]] = int(TokenType.UNKNOWN)
    return tokens, types
