"""Tiny random models with a byte-level tokenizer, made by transformers, which is also the oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
END_ID = 256
VOCAB = 320
"""Size of the vocabulary: 256 bytes, the special tokens, and padding, as real models have."""


def write_tokenizer(
    folder: Path, special: Sequence[str] = SPECIAL, template: str = CHAT_TEMPLATE, end: str = SPECIAL[0]
) -> None:
    """Write a tokenizer of bytes and the control tokens `special`. `end` is its end-of-sequence token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": end,
                "chat_template": template,
                "clean_up_tokenization_spaces": False,
            }
        )
    )


def write_model(folder: Path, *, seed: int = 0, context_length: int = 512, vocab_size: int = VOCAB) -> None:
    """Write a two-layer Llama with grouped heads, with random weights that give distinct logits."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=context_length,
        initializer_range=0.2,
        eos_token_id=END_ID,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def write_tiny(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder)
    write_tokenizer(folder)
    return folder
