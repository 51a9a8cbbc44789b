"""Products with packed weights against torch's: bfloat16 `linear`, and aten's own int8 and int4 products.

    python -m benchmarks.linear [--threads 2] [--rows 1 4 8 16 32 64] [--model NAME] [--seconds 0.4]

The shapes are those of a model's layers and head. Each product takes another copy of its weights in turn,
`--cold-mb` of them, so that none finds its own in a cache; contenders alternate in one loop, and each time
is the least of several. GB/s are the weights that were read; "x" is the time of torch's bfloat16 product
over this one. At the end: all the products of one decode step, and the head where masks allow few tokens.

"x too" rounds x to int8 as well. aten's int8 has one scale a row and its int4 one for 32 inputs, like ours
with an offset.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import fastest
from ramify.kernels.registry import Linear, ops
from ramify.kernels.weights.packed import PackedWeight, pack
from ramify.kernels.weights.rows import Rows, quantised
from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.model.config import ModelConfig
from ramify.runtime.model.hub.resolve import resolve
from ramify.runtime.model.load import read_config
from ramify.runtime.model.quantization import GROUPS

ATEN_GROUP = 32

Contender = tuple[str, int, Callable[[int], object]]
"""A name, the bytes of one copy of its weights, and the product with copy number i."""


def best(contenders: list[Contender], copies: int, seconds: float) -> list[float]:
    """Seconds of each one's fastest product; copies of the weights are taken in turn."""
    copy = itertools.cycle(range(copies))
    return fastest([lambda call=call: call(next(copy)) for _, _, call in contenders], seconds, repeat=3)


def shapes(config: ModelConfig) -> Iterator[tuple[str, int, int, bool, int]]:
    """Name, outputs, inputs, gated, and how many products of that shape a step makes."""
    hidden, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
    keys = config.num_kv_heads * head_dim
    yield "qkv", heads * head_dim + 2 * keys, hidden, False, config.num_layers
    yield "output", hidden, heads * head_dim, False, config.num_layers
    yield "gate, up", 2 * config.intermediate_size, hidden, True, config.num_layers
    yield "down", hidden, config.intermediate_size, False, config.num_layers
    yield "head", config.vocab_size, hidden, False, 1


def gate(y: Tensor, gated: bool) -> Tensor:
    if not gated:
        return y
    first, second = y.chunk(2, dim=-1)
    return F.silu(first) * second


class Case:
    """Copies of one matrix in every form."""

    def __init__(self, outputs: int, inputs: int, gated: bool, cold_mb: float) -> None:
        self.gated = gated
        self.copies = max(1, round(cold_mb * 2**20 / (2 * outputs * inputs)))
        self.plain = 0.05 * torch.randn(self.copies, outputs, inputs)
        self.bf16 = self.plain.bfloat16()

        def packed(form: Callable[[Tensor], Rows]) -> list[PackedWeight]:
            return [pack(form(weight), inputs=inputs, gated=gated) for weight in self.plain]

        self.packed = {
            "bf16": packed(lambda weight: Rows(weight.bfloat16())),
            "int8": packed(lambda weight: quantised(weight, "int8", GROUPS["int8"])),
            "int4": packed(lambda weight: quantised(weight, "int4", GROUPS["int4"])),
        }

    def contenders(self, x: Tensor, linear: Linear, rounding: Linear | None) -> list[Contender]:
        def torch_bf16(index: int) -> object:
            return gate(F.linear(x, self.bf16[index]), self.gated)

        def ours(weights: list[PackedWeight], linear: Linear) -> Callable[[int], object]:
            return lambda index: linear(x, weights[index])

        found: list[Contender] = [("torch bf16", self.bf16[0].nbytes, torch_bf16)]
        for name, weights in self.packed.items():
            size = weights[0].panels.nbytes + weights[0].scales.nbytes
            found.append((name, size, ours(weights, linear)))
            if name in ("int8", "int4") and rounding is not None:
                found.append((f"{name}, x too", size, ours(weights, rounding)))
        return [*found, self._aten_int8(x), self._aten_int4(x)]

    def _aten_int8(self, x: Tensor) -> Contender:
        scales = (self.plain.abs().amax(-1) / 127).bfloat16()
        numbers = (self.plain / scales.float()[..., None]).round().clamp(-127, 127).to(torch.int8)

        def call(index: int) -> object:
            return gate(torch.ops.aten._weight_int8pack_mm(x, numbers[index], scales[index]), self.gated)

        return "aten int8", numbers[0].nbytes + scales[0].nbytes, call

    def _aten_int4(self, x: Tensor) -> Contender:
        groups = self.plain.unflatten(-1, (-1, ATEN_GROUP))
        low, high = groups.amin(-1), groups.amax(-1)
        steps = (high - low) / 15
        numbers = ((groups - low[..., None]) / steps[..., None]).round().clamp(0, 15).int().flatten(2)
        packed = [torch.ops.aten._convert_weight_to_int4pack_for_cpu(matrix, 1) for matrix in numbers]
        # aten's numbers stand for (number - 8) * scale + zero.
        scales = torch.stack([steps, low + 8 * steps], -1).bfloat16().transpose(1, 2).contiguous()

        def call(index: int) -> object:
            product = torch.ops.aten._weight_int4pack_mm_for_cpu
            return gate(product(x, packed[index], ATEN_GROUP, scales[index]), self.gated)

        return "aten int4", packed[0].nbytes + scales[0].nbytes, call


def masked_head(weight: PackedWeight, rows: int, share: float, seconds: float) -> list[float]:
    """Seconds of the whole head, with a mask of random tokens for each row, and with one for all rows."""
    backend, vocab = ops("cpu"), weight.outputs
    linear, masked = backend.linear, backend.masked_linear
    assert linear is not None
    assert masked is not None
    x, out = torch.randn(rows, weight.inputs).bfloat16(), torch.empty(rows, vocab)
    allowed = F.pad(torch.rand(rows, vocab) < share, (0, -vocab % 32)).view(rows, -1, 32)
    mask = (allowed * 2 ** torch.arange(32)).sum(-1).to(torch.int32)
    each, one = torch.arange(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    calls: list[Callable[[int], object]] = [
        lambda _: linear(x, weight, out=out),
        lambda _: masked(x, weight, mask, each, out=out),
        lambda _: masked(x, weight, mask, one, out=out),
    ]
    return best([("", 0, call) for call in calls], 1, seconds)


def masked_heads(config: ModelConfig, seconds: float) -> None:
    print(
        "\nthe head where masks allow a share of the tokens, over the whole head: a mask a row, one for all"
    )
    plain = 0.05 * torch.randn(config.vocab_size, config.hidden_size)
    forms = {
        "bf16": Rows(plain.bfloat16()),
        "int8": quantised(plain, "int8", GROUPS["int8"]),
        "int4": quantised(plain, "int4", GROUPS["int4"]),
    }
    for form, numbers in forms.items():
        weight = pack(numbers, inputs=config.hidden_size)
        for rows in (1, 8, 32):
            columns = []
            for share in (12 / config.vocab_size, 0.001, 0.01, 0.05, 0.2):
                whole, own, same = masked_head(weight, rows, share, seconds)
                columns.append(f"{share:.2%}: {own / whole:.2f}, {same / whole:.2f}")
            print(f"{form}, {rows} rows, {whole * 1e3:.2f} ms: " + " | ".join(columns), flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--seconds", type=float, default=0.4, help="for each contender, shape and row count")
    parser.add_argument("--cold-mb", type=float, default=150.0)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    backend = ops("cpu", int8=True)
    linear = backend.linear
    assert linear is not None
    large = torch.ones(1 << 26)
    (seconds,) = best([("read", large.nbytes, lambda index: large.sum())], 1, args.seconds)
    print(f"{args.threads} threads; reading a large array: {large.nbytes / seconds / 1e9:.1f} GB/s")
    steps: Counter[tuple[int, str]] = Counter()
    for shape, outputs, inputs, gated, count in shapes(read_config(resolve(args.model).weights)):
        case = Case(outputs, inputs, gated, args.cold_mb)
        for rows in args.rows:
            contenders = case.contenders(torch.randn(rows, inputs).bfloat16(), linear, backend.layer_linear)
            times = best(contenders, case.copies, args.seconds)
            columns = []
            for (name, size, _), took in zip(contenders, times, strict=True):
                steps[rows, name] += round(took * count * 1e9)
                columns.append(
                    f"{name} {took * 1e6:.0f} us {size / took / 1e9:.1f} GB/s {times[0] / took:.1f}x"
                )
            print(f"{shape} {outputs} x {inputs}, {rows} rows: " + " | ".join(columns), flush=True)
    print("\nproducts of a whole step, ms (times torch's bfloat16)")
    for rows in args.rows:
        plain = steps[rows, "torch bf16"]
        columns = [
            f"{name} {took / 1e6:.2f} ({plain / took:.1f}x)"
            for (count, name), took in steps.items()
            if count == rows
        ]
        print(f"{rows} rows: " + " | ".join(columns))
    masked_heads(read_config(resolve(args.model).weights), args.seconds)


if __name__ == "__main__":
    main()
