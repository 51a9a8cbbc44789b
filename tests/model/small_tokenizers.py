"""Small tokenizers of the kinds that GGUF files hold, made from a text of ours."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from ramify.runtime.quantize.quality import TEXT

TEMPLATE = "{% for message in messages %}<|user|>{{ message.content }}<|end|>{% endfor %}"
DIGITS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
"""SmolLM2's pre-tokenizer."""


def splits(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of Llama 3, Qwen and others: a pattern, then bytes."""
    found = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(
        [*found, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def write_byte_level(
    folder: Path,
    pre_tokenizer: pre_tokenizers.PreTokenizer = DIGITS,
    *,
    size: int = 300,
    ignore_merges: bool = False,
) -> None:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(TEXT)], trainer)
    _write(tokenizer, folder)


def write_sentencepiece(folder: Path, *, prefix: bool = True) -> None:
    """A tokenizer as transformers converts sentencepiece's BPE: every pair of tokens that joins to a token is
    a merge, and the pairs of a better token come first."""
    text = TEXT.read_text(encoding="utf-8").replace(" ", "▁")
    trainer = BpeTrainer(vocab_size=200, show_progress=False)
    learned = Tokenizer(models.BPE())
    learned.train_from_iterator(text.splitlines(), trainer)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = sorted(learned.get_vocab(), key=learned.get_vocab().__getitem__)
    vocab = {token: index for index, token in enumerate(["<unk>", *bytes_, *words])}
    merges = [
        (word[:at], word[at:])
        for word in words
        for at in range(1, len(word))
        if word[:at] in vocab and word[at:] in vocab
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁") if not prefix else None
    if prefix:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    _write(tokenizer, folder, unk_token="<unk>")


def _write(tokenizer: Tokenizer, folder: Path, **special: str) -> None:
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in ("<s>", "<|user|>", "<|end|>")]
    )
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    loaded = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|end|>", chat_template=TEMPLATE, **special
    )
    loaded.save_pretrained(folder)
