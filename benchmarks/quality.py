"""What each weight format costs in quality: logits, perplexity and greedy tokens against float32.

    python -m benchmarks.quality [--model NAME] [--tokens 40] [--formats none gguf int8 int4]

The reference is the checkpoint in float32, its own quantisation undone. Every format runs as it is served,
with bfloat16 activations that are rounded to int8 or not, and twice: over the text in chunks of 256 tokens,
as a prefill, and over its beginning token by token, as decoding, because the two may multiply in different
ways (`kernels/cpu/linear.py`). "torch" is bfloat16 without packing.

logits     root mean square of their error, as a share of the standard deviation of the exact ones
KL         mean divergence from the exact distribution of the next token, in thousandths of a nat
same       share of positions with the same most likely token
greedy     share of the tokens of continuations, each from its prompt on, up to the first that differs
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.model.hub.resolve import resolve
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


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=40, help="of each greedy continuation")
    parser.add_argument("--decoded", type=int, default=400, help="tokens of the text that are decoded")
    parser.add_argument("--formats", nargs="+", default=["torch", "none", "gguf", "int8", "int4"])
    parser.add_argument("--exact-activations", action="store_true", help="as `ramify serve` has it")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    files = resolve(args.model)
    tokenizer = load_tokenizer(files.tokenizer)
    ids = np.array(tokenizer(TEXT.read_text(encoding="utf-8")).input_ids)
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
    print(f"{'':<20}{'logits':>9}{'KL':>9}{'same':>9}{'perplexity':>12}{'greedy':>9}")
    for form in args.formats:
        quantization = "none" if form == "torch" else form
        sequence = Sequence(files, quantization, torch.bfloat16, form != "torch", not args.exact_activations)
        found = [sequence.continued(prompt, args.tokens) for prompt in prompts]
        equal = sum(map(agreeing, found, wanted)) / sum(map(len, wanted))
        for name, chunk, count in (("prefill", 256, len(ids)), ("decode", 1, args.decoded)):
            seen = compared(sequence.text(ids[:count], chunk), exact[:count], ids[:count])
            columns = (
                f"{seen.logits:>9.2%}{1e3 * seen.divergence:>9.2f}{seen.same:>9.1%}{seen.perplexity:>12.3f}"
            )
            print(f"{form + ', ' + name:<20}{columns}{equal:>9.1%}", flush=True)


if __name__ == "__main__":
    main()
