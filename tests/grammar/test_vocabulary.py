"""Token bytes from tokenizers of both kinds, and from the default model's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from ramify import constraint
from ramify.errors import EngineError
from ramify.grammar.vocabulary import Vocabulary, from_tokenizer
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.tokenizer.tokenizer import CACHED_FROM, load_tokenizer, load_vocabulary
from tests.grammar.keyword_cases import CASES
from tests.grammar.vocabularies import (
    CONTROL,
    CORPUS,
    STOP,
    accepts,
    compiled,
    json_text,
    mask_of,
    takes,
    tiny,
    tiny_tokenizer,
)


def test_byte_level_tokens_spell_their_text() -> None:
    for text in [*CORPUS, "\0\x7f😀"]:
        ids = tiny_tokenizer().encode(text).ids
        assert b"".join(tiny().tokens[token] for token in ids).decode() == text


def test_special_tokens_and_padding_have_no_bytes() -> None:
    assert tiny().size == 500
    assert tiny().tokens[STOP] == tiny().tokens[CONTROL] == b""
    assert set(tiny().tokens[tiny_tokenizer().get_vocab_size() :]) == {b""}
    assert tiny().stop_ids == (STOP,)


def test_byte_fallback_tokens() -> None:
    pieces = ["<unk>", "<s>", "▁hi", "▁", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("<s>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    vocabulary = from_tokenizer(tokenizer, vocab_size=300, stop_ids=[1])
    assert vocabulary.tokens[:6] == (b"", b"", b" hi", b" ", "é".encode(), b"\0")
    assert vocabulary.tokens[len(pieces)] == b"<tool>"
    assert vocabulary.tokens[5 + 255] == b"\xff"


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    tokenizer = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(EngineError, match="WordPiece"):
        from_tokenizer(tokenizer, vocab_size=3, stop_ids=[2])


def test_it_survives_its_bytes() -> None:
    again = Vocabulary.from_bytes(tiny().to_bytes())
    assert again.tokens == tiny().tokens
    assert again.stop_ids == tiny().stop_ids
    assert again.spelled_bytes == tiny().spelled_bytes == frozenset(range(256))


@pytest.mark.weights
def test_a_large_tokenizer_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path / "home"))
    file, padding = tmp_path / "tokenizer.json", " " * CACHED_FROM
    file.write_text(tiny_tokenizer().to_str() + padding)
    first = load_vocabulary(tmp_path, vocab_size=500, stop_ids=[STOP])
    wider = load_vocabulary(tmp_path, vocab_size=512, stop_ids=[STOP])
    assert (first.tokens, first.stop_ids, wider.size) == (tiny().tokens, (STOP,), 512)
    changed, stat = json.loads(file.read_text()), file.stat()
    file.write_bytes(bytes(stat.st_size))  # the file is not read again
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    again = load_vocabulary(tmp_path, vocab_size=500, stop_ids=[STOP])
    assert (again.tokens, again.stop_ids) == (first.tokens, first.stop_ids)
    changed["added_tokens"] = changed["added_tokens"][:1]  # <control> is plain text now
    file.write_text(json.dumps(changed) + padding)
    assert load_vocabulary(tmp_path, vocab_size=500, stop_ids=[STOP]).tokens[CONTROL]
    assert len(list((tmp_path / "home" / "vocabularies").glob("*/[!.]*"))) == 2, "the old one is gone"


def test_smollm2_spells_what_its_tokenizer_decodes(smollm2: Vocabulary, model_files: ModelFiles) -> None:
    tokenizer = load_tokenizer(model_files.tokenizer)
    for text in [*CORPUS, "Ünïcödé 日本語 😀\n\t"]:
        ids = tokenizer.encode(text)
        assert b"".join(smollm2.tokens[token] for token in ids).decode() == text
    assert [token for token in range(17) if smollm2.tokens[token]] == []


@pytest.mark.weights
@pytest.mark.parametrize(
    "name", ["number between", "string", "pattern and length", "recursion", "count of all"]
)
def test_smollm2_takes_instances_in_its_own_tokens(
    name: str, smollm2: Vocabulary, model_files: ModelFiles
) -> None:
    schema, valid, invalid = CASES[name]
    grammar = compiled(constraint.json_schema(schema), smollm2)
    tokenizer = load_tokenizer(model_files.tokenizer)
    for instance in valid:
        ids = tokenizer.encode(json_text(instance))
        if b"".join(smollm2.tokens[token] for token in ids) != json_text(instance).encode():
            continue  # a character that this tokenizer has no bytes for
        assert takes(grammar.matcher(), [*ids, 2], smollm2), instance
    for instance in invalid:
        ids = tokenizer.encode(json.dumps(instance, ensure_ascii=False))
        assert not takes(grammar.matcher(), [*ids, 2], smollm2), instance
    assert not mask_of(grammar.matcher(), smollm2)[:17].any()


@pytest.mark.weights
def test_what_smollm2_cannot_spell_is_never_begun(smollm2: Vocabulary) -> None:
    assert 0x04 not in smollm2.spelled_bytes
    grammar = compiled(constraint.regex("\\u0004|[\\u0004a]b"), smollm2)
    mask = mask_of(grammar.matcher(), smollm2)
    assert {smollm2.tokens[token] for token in np.flatnonzero(mask)} == {b"a", b"ab"}
    assert accepts(grammar, "ab", smollm2)
