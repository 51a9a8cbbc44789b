"""The quality that each weight format costs: logits, perplexity and greedy tokens against float32.

    python -m benchmarks.quality [--model NAME] [--tokens 40] [--formats none gguf int8 int4]
        [--kv-cache-dtype auto int8] [--text FILE]
        [--peers openvino=VENV/bin/python llama.cpp=FOLDER]

The reference is the checkpoint dequantised to float32. Every format runs as it is served, with bfloat16
activations, either rounded to int8 or not. It runs twice: over the text in chunks of 256 tokens, as a
prefill, and over the beginning of the text token by token, as decoding. The two may use different kernels
(`kernels/cpu/linear.py`). "torch" is bfloat16 without packing. Peers (`benchmarks.peers` says how they are
installed) read the same GGUF file and compute the same tokens, with their own defaults.

logits     root mean square of their error, as a share of the standard deviation of the exact ones
KL         mean divergence from the exact distribution of the next token, in thousandths of a nat
same       share of positions with the same most likely token
greedy     share of the tokens of greedy continuations that come before the first difference
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.peers import DRIVERS
from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.inspect.resolve import resolve
from ramify.runtime.model.loading.load import read_config
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer
from ramify.runtime.quantize.quality import TEXT, Sequence, agreeing, compared, perplexity

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics state that",
    "Dear Sir or Madam, I am writing to",
    "To make a cup of tea, first",
    "The difference between a virus and a bacterium is",
    "In 1969, astronauts",
    "Q: What is 17 plus 25?\nA:",
    "Here is a list of five fruits:\n1.",
    "The most important invention of the nineteenth century was",
    "Photosynthesis is the process by which",
    "SELECT name, age FROM users WHERE",
    "My favourite season is autumn, because",
    "Water boils at",
    "A good teacher should",
)


def peer_logits(
    name: str, where: str, model: Path, ids: np.ndarray, chunk: int, shape: tuple[int, int]
) -> torch.Tensor:
    """A peer's logits after each token, from the GGUF file `model`: (tokens, vocabulary) float32."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "logits")
        given = {"model": str(model), "ids": ids.tolist(), "chunk": chunk, "vocabulary": shape[1]}
        given |= {"threads": torch.get_num_threads(), "out": str(out)}
        if name == "openvino":
            command, at = [where, str(DRIVERS / "logits_openvino.py")], None
        elif name == "llama.cpp":
            command, at = ["node", str(DRIVERS / "logits_llama_cpp.mjs")], where
        else:
            raise SystemExit(f"There is no peer {name!r}: openvino or llama.cpp.")
        subprocess.run([*command, json.dumps(given)], cwd=at, check=True, stdout=subprocess.DEVNULL)
        return torch.from_numpy(np.fromfile(out, dtype=np.float32).reshape(shape))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=40, help="of each greedy continuation")
    parser.add_argument("--decoded", type=int, default=400, help="tokens of the text that are decoded")
    parser.add_argument("--formats", nargs="+", default=["torch", "none", "gguf", "int8", "int4"])
    parser.add_argument("--kv-cache-dtype", nargs="+", choices=["auto", "int8"], default=["auto"])
    parser.add_argument("--text", type=Path, default=TEXT, help="read up to the model's context")
    parser.add_argument("--exact-activations", action="store_true", help="as `ramify serve` has it")
    parser.add_argument("--peers", nargs="+", default=[], metavar="NAME=WHERE")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    files = resolve(args.model)
    tokenizer = load_tokenizer(files.tokenizer)
    context = read_config(files.weights).default_context_length
    ids = np.array(tokenizer(args.text.read_text(encoding="utf-8"), verbose=False).input_ids[:context])
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    reference = Sequence(files, "none", torch.float32, packed=False)
    exact = reference.text(ids, 256)
    wanted = [reference.continued(prompt, args.tokens) for prompt in prompts]
    del reference
    first = perplexity(exact[: args.decoded], ids[: args.decoded])
    print(
        f"{files.weights.name}: {len(ids)} tokens, float32 perplexity {perplexity(exact, ids):.3f}; "
        f"of the first {args.decoded} {first:.3f}"
    )
    print(f"{'':<24}{'logits':>9}{'KL':>9}{'same':>9}{'perplexity':>12}{'greedy':>9}")
    runs = (("prefill", 256, len(ids)), ("decode", 1, args.decoded))
    for form, pages in itertools.product(args.formats, args.kv_cache_dtype):
        quantization = "none" if form == "torch" else form
        kept = torch.int8 if pages == "int8" else None
        packed, rounds = form != "torch", not args.exact_activations
        sequence = Sequence(files, quantization, torch.bfloat16, packed, rounds, kept)
        found = [sequence.continued(prompt, args.tokens) for prompt in prompts]
        equal = sum(map(agreeing, found, wanted)) / sum(map(len, wanted))
        for name, chunk, count in runs:
            title = f"{form}, {name}" + (", int8 KV" if kept else "")
            show(title, sequence.text(ids[:count], chunk), exact, ids, f"{equal:>9.1%}")
        del sequence
    for peer in args.peers:
        name, _, where = peer.partition("=")
        for run, chunk, count in runs:
            shape = (count, exact.shape[1])
            logits = peer_logits(name, where, files.weights.absolute(), ids[:count], chunk, shape)
            show(f"{name}, {run}", logits, exact, ids)


def show(title: str, logits: torch.Tensor, exact: torch.Tensor, ids: np.ndarray, greedy: str = "") -> None:
    """Print a line that compares `logits` with `exact`, at the first len(logits) positions of the text."""
    seen = compared(logits, exact[: len(logits)], ids[: len(logits)])
    columns = f"{seen.logits:>9.2%}{1e3 * seen.divergence:>9.2f}{seen.same:>9.1%}{seen.perplexity:>12.3f}"
    print(f"{title:<24}{columns}{greedy}", flush=True)


if __name__ == "__main__":
    main()
