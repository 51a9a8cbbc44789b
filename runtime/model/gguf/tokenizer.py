"""Converts a GGUF file's tokenizer to a Hugging Face folder, which loads in 0.15 s.

The conversion takes 5 s and imports torch, so it runs in a subprocess. Its result is cached.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from ramify import cache
from ramify.errors import InvalidRequest
from ramify.runtime.model.gguf.header import read_header

FORMAT_VERSION = 1
"""Part of the cache's key. Increase it whenever `convert_tokenizer` writes something else."""


def convert_tokenizer(weights: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template of a GGUF file into `folder`."""
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

    The cache key is the file's size, modification time and header, which includes the vocabulary. Hashing a
    file of 10 GB would be slow.
    """
    status = weights.stat()
    identity = f"{FORMAT_VERSION} {status.st_size} {status.st_mtime_ns} {read_header(weights).digest}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:32]
    return cache.ensure(cache.home() / "tokenizers" / key, lambda folder: convert_tokenizer(weights, folder))


def _main(weights: Path, folder: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from ramify.runtime.model.gguf.pre_tokenizers import set_pre_tokenizer

    folder_of = str(weights.absolute().parent)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder_of, gguf_file=weights.name)
    except (ValueError, KeyError):  # it reads the model's config too, of few architectures
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder_of, gguf_file=weights.name)
    # The library splits texts of the pre-tokenizers that it does not know as GPT-2 does.
    set_pre_tokenizer(
        tokenizer.backend_tokenizer, read_header(weights).metadata.get("tokenizer.ggml.pre", "")
    )
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
