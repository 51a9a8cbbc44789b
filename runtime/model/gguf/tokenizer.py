"""Converts a GGUF file's tokenizer to a Hugging Face folder, which loads in 0.15 s.

The conversion takes 5 s and imports torch, so it runs in a subprocess. Its result is cached.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ramify import cache
from ramify.errors import InvalidRequest
from ramify.runtime.model.gguf import pre_tokenizers
from ramify.runtime.model.gguf.header import read_header
from ramify.runtime.model.gguf.pre_tokenizers import rule_of, set_pre_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def convert_tokenizer(weights: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template of a GGUF file into `folder`.

    Raises `UnsupportedField` for an unknown pre-tokenizer, and `InvalidRequest` if the conversion fails.
    """
    rule_of(read_header(weights).metadata)
    command = [sys.executable, "-P", "-m", "ramify.runtime.model.gguf.tokenizer", str(weights), str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}  # the file has everything that is needed
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode or not (folder / "tokenizer.json").is_file():
        reason = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise InvalidRequest(
            f"The tokenizer in {weights} cannot be converted: {reason[0]}.",
            field="model",
            remedy="Use the model's safetensors folder, or a GGUF file with a tokenizer.",
        )


def tokenizer_of(weights: Path) -> Path:
    """The cached tokenizer folder of a GGUF file; converted on first use.

    The cache key is the file's size, modification time and header, which includes the vocabulary: hashing a
    file of 10 GB would be slow. With them go the sources and the library that convert it.
    """
    status = weights.stat()
    sources = Path(__file__).read_bytes() + Path(pre_tokenizers.__file__).read_bytes()
    converter = f"{metadata.version('transformers')} {hashlib.sha256(sources).hexdigest()}"
    identity = f"{converter} {status.st_size} {status.st_mtime_ns} {read_header(weights).digest}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:32]
    return cache.ensure(cache.home() / "tokenizers" / key, lambda folder: convert_tokenizer(weights, folder))


def read_tokenizer(weights: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file. Imports torch. Raises `UnsupportedField` for an unknown pre-tokenizer."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    rule = rule_of(read_header(weights).metadata)
    folder_of = str(weights.absolute().parent)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder_of, gguf_file=weights.name)
    except (ValueError, KeyError, TypeError):  # it reads the model's config too, and fails at that of gpt-oss
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder_of, gguf_file=weights.name)
    if rule is not None:
        set_pre_tokenizer(tokenizer.backend_tokenizer, rule)
    return tokenizer


if __name__ == "__main__":
    read_tokenizer(Path(sys.argv[1])).save_pretrained(Path(sys.argv[2]))
