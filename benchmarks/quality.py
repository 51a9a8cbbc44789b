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
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ramify.kernels.registry import ops
from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.kv_pool import KvPool
from ramify.runtime.executor.runner import Runner
from ramify.runtime.model.hub.resolve import ModelFiles, resolve
from ramify.runtime.model.load import load_model
from ramify.runtime.model.quantization import Quantization
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer

PAGE_SIZE = 16
TEXT = Path(__file__).with_name("quality.txt")
"""Prose, instructions, talk and code, written for this benchmark."""
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


class Sequence:
    """One model with room for one sequence."""

    def __init__(
        self,
        files: ModelFiles,
        quantization: Quantization,
        dtype: torch.dtype,
        packed: bool,
        int8: bool = False,
    ) -> None:
        model = load_model(files, dtype=dtype, quantization=quantization, packed=packed)
        pages = -(-model.config.context_length // PAGE_SIZE)
        pool = KvPool(model.config, num_pages=pages, page_size=PAGE_SIZE, dtype=dtype)
        self.runner, self.pages = Runner(model, pool, ops("cpu", int8=int8)), list(range(pages))

    def logits(self, ids: np.ndarray, start: int, stop: int) -> Tensor:
        """After each of the tokens [start, stop), where all before were computed: (stop - start, vocab)."""
        extension = Extension(ids=ids, start=start, stop=stop, pages=self.pages)
        return self.runner.logits(self.runner.forward(pack([extension], PAGE_SIZE)))

    def text(self, ids: np.ndarray, chunk: int) -> Tensor:
        starts = range(0, len(ids), chunk)
        return torch.cat([self.logits(ids, at, min(at + chunk, len(ids))) for at in starts])

    def continued(self, prompt: list[int], tokens: int) -> list[int]:
        ids = np.array(prompt + [0] * tokens)
        last = self.logits(ids, 0, len(prompt))[-1]
        for at in range(len(prompt), len(ids)):
            ids[at] = int(last.argmax())
            last = self.logits(ids, at, at + 1)[-1]
        return ids[len(prompt) :].tolist()


def agreeing(found: list[int], wanted: list[int]) -> int:
    """Tokens before the first difference."""
    pairs = zip(found, wanted, strict=True)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(wanted))


def perplexity(logits: Tensor, ids: np.ndarray) -> float:
    chosen = torch.from_numpy(ids[1:]).long()
    return math.exp(torch.nn.functional.cross_entropy(logits[:-1], chosen).item())


def compared(logits: Tensor, exact: Tensor, ids: np.ndarray) -> str:
    error = (logits - exact).square().mean().sqrt() / exact.std()
    wanted, found = exact.log_softmax(-1), logits.log_softmax(-1)
    divergence = torch.nn.functional.kl_div(found, wanted, log_target=True, reduction="batchmean")
    same = (logits.argmax(-1) == exact.argmax(-1)).float().mean()
    return (
        f"{error.item():>9.2%}{1e3 * divergence.item():>9.2f}"
        f"{same.item():>9.1%}{perplexity(logits, ids):>12.3f}"
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
            columns = compared(sequence.text(ids[:count], chunk), exact[:count], ids[:count])
            print(f"{form + ', ' + name:<20}{columns}{equal:>9.1%}", flush=True)


if __name__ == "__main__":
    main()
