"""The compiled attention against its ceilings: memory bandwidth for decodes, arithmetic for prefills.

    python -m benchmarks.cpu_attention [--threads 2] [--dtype bfloat16] [--heads 9 3] [--head-dim 64]
        [--exact-activations]

For decodes it prints the GB/s of keys and values read, beside the bandwidth of reading a large array. For
prefills it prints the GFLOP/s of the visible scores, beside those of a large float32 matrix product. `twin`,
`sdpa` and `int8` are times over the kernel's time: of the kernel's twin in torch, of torch's
scaled_dot_product_attention, and of the kernel on int8 pages, timed in turns. SDPA runs on gathered keys and
values of equal length, so that neither padding nor gathering is counted. Pages lie in random order. Up to 8
layers, of about `--cold-mb` together, take turns as in a model, so that no layer finds its keys and values in
the cache. Times are the best of several calls.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.roofline import read_bandwidth
from benchmarks.timing import fastest
from ramify.kernels.reference.kv_store import quantise_rows
from ramify.kernels.registry import ops

DECODES = [(batch, context) for batch in (1, 8, 32) for context in (256, 1024, 4096)]
PREFILLS = [(512, 0), (512, 1500), (64, 1500), (2048, 0)]


def best(call: Callable[[], object]) -> float:
    return fastest([call], 0.4)[0]


def ceilings() -> tuple[float, float]:
    """Bytes a second that a sum over 512 MiB reads, and FLOP/s of a float32 matrix product."""
    a = torch.randn(1024, 1024)
    return read_bandwidth(), 2 * 1024**3 / best(lambda: a @ a)


class Case:
    """Sequences of equal lengths over several layers of pages."""

    def __init__(
        self, lengths: tuple[int, int, int], heads: tuple[int, int], head_dim: int, args: argparse.Namespace
    ) -> None:
        batch, new, stored = lengths
        self.new, self.stored = new, stored
        query_heads, kv_heads = heads
        dtype = getattr(torch, args.dtype)
        pages = -(-stored // args.page_size)
        self.kv_bytes = 2 * batch * stored * kv_heads * head_dim * dtype.itemsize
        layers = max(1, min(8, round(args.cold_mb * 2**20 / self.kv_bytes)))
        shape = (layers, batch * pages, kv_heads, args.page_size, head_dim)
        self.k, self.v = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        self.page_table = torch.randperm(batch * pages).to(torch.int32).view(batch, pages)
        self.starts = torch.arange(batch + 1, dtype=torch.int32) * new
        self.lens = torch.full((batch,), stored, dtype=torch.int32)
        self.q = torch.randn(batch * new, query_heads, head_dim).to(dtype)
        self.scale = head_dim**-0.5
        visible = batch * (new * (stored - new) + new * (new + 1) // 2)
        self.flop = 4 * query_heads * head_dim * visible

    def paged(self, attention: Callable[..., torch.Tensor]) -> Callable[[], object]:
        out = torch.empty_like(self.q)
        layer = self._layers()
        tables = (self.page_table, self.starts, self.lens)

        def call() -> None:
            index = next(layer)
            attention(self.q, self.k[index], self.v[index], *tables, scale=self.scale, out=out)

        return call

    def dense(self) -> Callable[[], object]:
        batch = len(self.lens)
        q = self.q.view(batch, self.new, *self.q.shape[1:]).transpose(1, 2).contiguous()
        k, v = (
            pool[:, self.page_table.long()].transpose(2, 3).flatten(3, 4)[:, :, :, : self.stored].contiguous()
            for pool in (self.k, self.v)
        )
        mask = None
        if self.new > 1:
            mask = torch.ones(self.new, self.stored, dtype=torch.bool).tril(self.stored - self.new)
        layer = self._layers()

        def call() -> None:
            index = next(layer)
            F.scaled_dot_product_attention(
                q, k[index], v[index], attn_mask=mask, scale=self.scale, enable_gqa=True
            )

        return call

    def _layers(self) -> Iterator[int]:
        while True:
            yield from range(len(self.k))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--heads", type=int, nargs=2, default=[9, 3], metavar=("HEADS", "KV_HEADS"))
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--cold-mb", type=float, default=64.0)
    parser.add_argument("--exact-activations", action="store_true", help="as the engine with that flag")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    kernel, twin = ops("cpu", int8=not args.exact_activations).paged_attention, ops("torch").paged_attention
    bandwidth, flops = ceilings()
    print(f"{args.threads} threads, {args.dtype}, heads {args.heads}, head_dim {args.head_dim}")
    print(f"ceilings: reads {bandwidth / 1e9:.1f} GB/s, float32 products {flops / 1e9:.0f} GFLOP/s")
    print(f"{'':<28}{'us':>10}{'rate':>16}{'of ceiling':>12}{'twin':>8}{'sdpa':>8}{'int8':>8}")
    for batch, context in DECODES:
        case = Case((batch, 1, context), tuple(args.heads), args.head_dim, args)
        seconds = best(case.paged(kernel))
        rate = case.kv_bytes / seconds
        report(
            f"decode {batch} x {context}",
            seconds,
            f"{rate / 1e9:.1f} GB/s",
            rate / bandwidth,
            case,
            kernel,
            twin,
        )
    for new, prefix in PREFILLS:
        case = Case((1, new, new + prefix), tuple(args.heads), args.head_dim, args)
        seconds = best(case.paged(kernel))
        rate = case.flop / seconds
        report(
            f"prefill {new} after {prefix}",
            seconds,
            f"{rate / 1e9:.0f} GFLOP/s",
            rate / flops,
            case,
            kernel,
            twin,
        )


def report(
    name: str,
    seconds: float,
    rate: str,
    share: float,
    case: Case,
    kernel: Callable[..., torch.Tensor],
    twin: Callable[..., torch.Tensor],
) -> None:
    ratios = [best(case.paged(twin)) / seconds, best(case.dense()) / seconds]
    narrow = copy.copy(case)
    narrow.k, narrow.v = quantise_rows(case.k.float()), quantise_rows(case.v.float())
    times = fastest([case.paged(kernel), narrow.paged(kernel)], 0.4)
    columns = "".join(f"{ratio:>7.1f}x" for ratio in ratios) + f"{times[1] / times[0]:>7.2f}x"
    print(f"{name:<28}{seconds * 1e6:>10.1f}{rate:>16}{share:>12.0%}{columns}", flush=True)


if __name__ == "__main__":
    main()
