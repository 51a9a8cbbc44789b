"""Write a GGUF file of random weights: of 1, 3 or 8 billion parameters, or of one layer.

    python -m benchmarks.random_gguf 1B Q4_K OUT.gguf

The tokenizer is the default model's. Matrices are in the given format, norms in float32; the head is tied to
the embedding. Ramify, llama.cpp and OpenVINO GenAI read the file.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.inspect.resolve import resolve

SIZES = {
    "1B": (16, 2048, 32, 8, 8192),
    "3B": (28, 3072, 24, 8, 8192),
    "8B": (32, 4096, 32, 8, 14336),
    "one-layer": (1, 64, 1, 1, 64),
}
"""(layers, hidden size, query heads, KV heads, inputs of the down projection), as Llama 3 has them. One layer
costs next to nothing."""
FLOAT16S = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2)}
"""Format → byte offsets of a block's float16 numbers: the scale, and the minimum if the format has one."""
FACTOR = 0.004
FILE_TYPES = {
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_K": gguf.LlamaFileType.MOSTLY_Q4_K_S,
}
"""Format → `general.file_type`. OpenVINO GenAI refuses files without it."""


def blocks(rows: int, columns: int, form: str, draw: np.random.Generator) -> np.ndarray:
    """(rows, bytes) uint8: blocks of the format `form` with random codes and `FACTOR` in place of every
    float16 number."""
    per_block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[form]]
    found = draw.integers(0, 256, (rows, columns // per_block, size), np.uint8)
    for at in FLOAT16S[form]:
        found[:, :, at : at + 2] = np.frombuffer(np.float16(FACTOR).tobytes(), np.uint8)
    return found.reshape(rows, -1)


def write(size: str, form: str, out: Path) -> None:
    layers, hidden, heads, kv_heads, inner = SIZES[size]
    head_dim, kind = hidden // heads, gguf.GGMLQuantizationType[form]
    shape = {
        "llama.block_count": layers,
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": inner,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.rope.dimension_count": head_dim,
        "llama.context_length": 8192,
    }
    source = gguf.GGUFReader(resolve(DEFAULT_MODEL).weights)
    writer = gguf.GGUFWriter(out, "llama")
    for key, field in source.fields.items():
        if not key.startswith(("GGUF", "general.")):
            kinds = field.types
            writer.add_key_value(key, shape.get(key, field.contents()), kinds[0], sub_type=kinds[-1])
    writer.add_name(f"random-{size}")
    writer.add_quantization_version(2)
    writer.add_file_type(FILE_TYPES[form])
    draw = np.random.default_rng(0)
    vocabulary = next(int(each.shape[1]) for each in source.tensors if each.name == "token_embd.weight")

    def matrix(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(f"{name}.weight", blocks(rows, columns, form, draw), raw_dtype=kind)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))

    matrix("token_embd", vocabulary, hidden)
    norm("output_norm")
    for layer in range(layers):
        prefix = f"blk.{layer}."
        norm(prefix + "attn_norm")
        norm(prefix + "ffn_norm")
        matrix(prefix + "attn_q", hidden, hidden)
        matrix(prefix + "attn_k", kv_heads * head_dim, hidden)
        matrix(prefix + "attn_v", kv_heads * head_dim, hidden)
        matrix(prefix + "attn_output", hidden, hidden)
        matrix(prefix + "ffn_gate", inner, hidden)
        matrix(prefix + "ffn_up", inner, hidden)
        matrix(prefix + "ffn_down", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("format", choices=FLOAT16S)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    write(options.size, options.format, options.out)


if __name__ == "__main__":
    main()
