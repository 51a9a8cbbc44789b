"""The distance of a model's predictions from those computed in float32 without quantisation, on a text of
ours."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ramify.kernels.registry import ops
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.kv_pool import KvPool
from ramify.runtime.executor.runner import Runner
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.loading.load import load_model, read_config
from ramify.runtime.model.quantization import Quantization, resolve_quantization
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer

PAGE_SIZE = 16
CHUNK = 256
"""Tokens computed at a time."""
TEXT = Path(__file__).with_name("quality.txt")
"""Prose, instructions, talk and code, written for this measurement."""


@dataclass(frozen=True)
class Compared:
    """The difference of a model's logits from the exact ones.

    logits: root mean square of the difference, divided by the standard deviation of the exact logits.
    divergence: Kullback-Leibler divergence of the next token's distribution from the exact one, in nats.
    same: share of positions at which the most likely token is the same.
    """

    logits: float
    divergence: float
    same: float
    perplexity: float
    tokens: int
    """Tokens of the text that were read."""


class Sequence:
    """A model with room for one sequence."""

    def __init__(
        self,
        files: ModelFiles,
        quantization: Quantization,
        dtype: torch.dtype,
        packed: bool,
        int8: bool = False,
        page_dtype: torch.dtype | None = None,
    ) -> None:
        model = load_model(files, dtype=dtype, quantization=quantization, packed=packed)
        pages = -(-model.config.context_length // PAGE_SIZE)
        pool = KvPool(model.config, num_pages=pages, page_size=PAGE_SIZE, dtype=dtype, page_dtype=page_dtype)
        self.runner, self.pages = Runner(model, pool, ops("cpu", int8=int8)), list(range(pages))

    def logits(self, ids: np.ndarray, start: int, stop: int) -> Tensor:
        """Logits after each of the tokens [start, stop): (stop - start, vocab). All earlier tokens must have
        been computed."""
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
    """Number of equal tokens before the first difference."""
    pairs = zip(found, wanted, strict=True)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(wanted))


def perplexity(logits: Tensor, ids: np.ndarray) -> float:
    chosen = torch.from_numpy(ids[1:]).long()
    return math.exp(torch.nn.functional.cross_entropy(logits[:-1], chosen).item())


def compared(logits: Tensor, exact: Tensor, ids: np.ndarray) -> Compared:
    error = (logits - exact).square().mean().sqrt() / exact.std()
    wanted, found = exact.log_softmax(-1), logits.log_softmax(-1)
    divergence = torch.nn.functional.kl_div(found, wanted, log_target=True, reduction="batchmean")
    same = (logits.argmax(-1) == exact.argmax(-1)).float().mean()
    return Compared(error.item(), divergence.item(), same.item(), perplexity(logits, ids), len(ids))


@torch.inference_mode()
def measured(source: ModelFiles, result: ModelFiles, tokens: int | None = None) -> tuple[float, Compared]:
    """The perplexity of `source`, computed in float32, and the comparison of `result` with `source`, computed
    as the engine does on the CPU.

    Reads the first `tokens` tokens of the text (None: all of it), at most one context's worth. Both models
    are loaded, `source` with 4 bytes a weight.
    """
    text = load_tokenizer(source.tokenizer)(TEXT.read_text(encoding="utf-8"), verbose=False).input_ids
    contexts = [read_config(files.weights).default_context_length for files in (source, result)]
    ids = np.array(text[: min([*contexts, tokens or len(text)])])
    exact = Sequence(source, "none", torch.float32, packed=False).text(ids, CHUNK)
    quantised = read_config(result.weights).quantised
    quantization = resolve_quantization("auto", result.weights, exact=False, quantised=quantised)
    found = Sequence(result, quantization, torch.bfloat16, packed=True).text(ids, CHUNK)
    return perplexity(exact, ids), compared(found.float(), exact, ids)
