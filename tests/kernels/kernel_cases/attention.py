"""Decode, prefill and cascade attention beside torch's SDPA with every backend and flex_attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ramify.kernels.triton.attention import plan_attention, plan_shape, run_plan
from ramify.kernels.triton.cascade import plan_from_page_tables
from tests.kernels.attention_cases import Batch
from tests.kernels.cascade_cases import dense
from tests.kernels.kernel_cases.base import Call, Case, Work, family, half

EXPECTED = {"decode": 0.8, "prefill": 0.48}
"""Shares of an H100's copy bandwidth and products: estimates, made before anything ran on one."""
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Sequences of `new` tokens each, the last of lens[b]; the first `shared` tokens are one for all."""

    new: int
    lens: tuple[int, ...]
    shared: int = 0


@dataclasses.dataclass(frozen=True)
class Model:
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    """The runtime's page size on CUDA devices."""

    def kv_bytes(self, tokens: int, size: int) -> int:
        return 2 * tokens * self.kv_heads * self.head_dim * size


class Inputs:
    """Random tensors in pages that lie in random order."""

    def __init__(self, lengths: Lengths, model: Model, device: torch.device) -> None:
        self.lengths, self.model, self.device = lengths, model, device
        dtype = half(device)
        page_size, batch = model.page_size, len(lengths.lens)
        shared = lengths.shared // page_size
        own = [-(-length // page_size) - shared for length in lengths.lens]
        order = torch.randperm(shared + sum(own)).to(torch.int32)
        self.page_table = torch.zeros(batch, shared + max(own), dtype=torch.int32)
        at = shared
        for row, count in enumerate(own):
            self.page_table[row, :shared] = order[:shared]
            self.page_table[row, shared : shared + count] = order[at : at + count]
            at += count
        shape = (len(order), model.kv_heads, page_size, model.head_dim)
        self.k = torch.randn(shape, dtype=dtype, device=device)
        self.v = torch.randn(shape, dtype=dtype, device=device)
        self.q = torch.randn(batch * lengths.new, model.heads, model.head_dim, dtype=dtype, device=device)
        self.out = torch.empty_like(self.q)
        self.table = self.page_table.to(device)
        self.starts = [row * lengths.new for row in range(batch + 1)]
        self.scale = model.head_dim**-0.5

    def ours(self, *, deterministic: bool = False, cascade: bool = False) -> Call:
        shape = plan_shape(self.q, self.k, window=0, deterministic=deterministic)
        if cascade:
            plan = plan_from_page_tables(
                self.page_table.numpy(), self.starts, self.lengths.lens, shape, self.device
            )
        else:
            plan = plan_attention(self.starts, self.lengths.lens, shape, self.device)
        return lambda: run_plan(plan, self.q, self.k, self.v, self.table, self.out, scale=self.scale)

    def moved(self) -> int:
        size = self.q.element_size()
        stored = sum(self.lengths.lens) - self.lengths.shared * (len(self.lengths.lens) - 1)
        return self.model.kv_bytes(stored, size) + 2 * self.q.numel() * size

    def flop(self) -> int:
        new = self.lengths.new
        visible = sum(new * (length - new) + new * (new + 1) // 2 for length in self.lengths.lens)
        return 4 * self.model.heads * self.model.head_dim * visible

    def torchs(self, *, flex: bool) -> dict[str, Call]:
        """Torch's calls on keys and values that are gathered and padded to one length beforehand,
        uncounted."""
        q, k, v, mask = self._dense()
        calls: dict[str, Call] = {}
        if flex:
            return {"torch flex": _flex(q, k, v, list(self.lengths.lens), self.scale)}
        causal = mask is None and self.lengths.new > 1
        for name, backend in BACKENDS.items():
            calls[f"torch {name}"] = _sdpa(q, k, v, mask, causal, backend, self.scale)
        return calls

    def twin(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Torch's output in `dtype`, one sequence at a time, for batches that no backend takes or has memory
        for."""
        starts, lens = (torch.tensor(each, dtype=torch.int32) for each in (self.starts, self.lengths.lens))
        batch = Batch(self.q, self.k, self.v, self.table, starts, lens)
        return dense(batch, dtype, scale=self.scale)

    def _dense(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        batch, new, longest = len(self.lengths.lens), self.lengths.new, max(self.lengths.lens)
        q = self.q.view(batch, new, *self.q.shape[1:]).transpose(1, 2).contiguous()
        k, v = (
            pages[self.table.long()].transpose(1, 2).flatten(2, 3)[:, :, :longest].contiguous()
            for pages in (self.k, self.v)
        )
        lens = torch.tensor(self.lengths.lens, device=self.device)
        whole = len(set(self.lengths.lens)) == 1
        if whole and new in (1, longest):
            return q, k, v, None
        position = lens[:, None] - new + torch.arange(new, device=self.device)
        mask = torch.arange(longest, device=self.device) <= position[:, None, :, None]
        return q, k, v, mask


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    backend: SDPBackend,
    scale: float,
) -> Call:
    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.transpose(1, 2).flatten(0, 1)

    return call


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: list[int], scale: float) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    new, longest = q.shape[2], k.shape[2]
    stored = torch.tensor(lens, device=q.device)

    def seen(
        batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor
    ) -> torch.Tensor:
        return column <= stored[batch] - new + row

    mask = create_block_mask(seen, len(lens), None, new, longest, device=str(q.device))
    compiled = torch.compile(flex_attention)

    def call() -> torch.Tensor:
        out = compiled(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).flatten(0, 1)

    return call


def _case(
    name: str, lengths: Lengths, model: Model, *, deterministic: bool = False, flex: bool = False
) -> Case:
    """Torch reads the shared prefix of every branch on its own; cascade's other rival is our flat form."""

    def build(device: torch.device) -> Work:
        inputs = Inputs(lengths, model, device)
        rivals = inputs.torchs(flex=flex)
        cascade = lengths.shared > 0
        if cascade:
            rivals["flat"] = inputs.ours()
        if deterministic:
            rivals["not deterministic"] = inputs.ours()
        run = inputs.ours(deterministic=deterministic, cascade=cascade)
        checks: dict[str, Call] = {**rivals, "twin": inputs.twin}
        reset = partial(inputs.out.fill_, torch.nan)
        return Work(run, inputs.moved(), inputs.flop(), rivals, checks, reset)

    gathered = len(lengths.lens) * max(lengths.lens)
    needs = 2 * model.kv_bytes(gathered, 2) + model.kv_bytes(sum(lengths.lens), 2)
    expected = None if deterministic else EXPECTED["decode" if lengths.new == 1 else "prefill"]
    return Case(f"{name}, compiled" if flex else name, build, needs, expected, compiled=flex)


def ragged(batch: int, longest: int) -> tuple[int, ...]:
    """Lengths from a sixteenth of `longest` to all of it, mostly short."""
    return tuple(
        max(1, int(longest / (1 + 15 * ((row * 7) % batch) / max(1, batch - 1)))) for row in range(batch)
    )


@family
def attention(tiny: bool) -> Iterator[Case]:
    shrink = 64 if tiny else 1
    llama = Model(4, 2, 64) if tiny else Model()
    pages16 = dataclasses.replace(llama, page_size=16)
    many = 3 if tiny else 64

    def k(thousands: float) -> int:
        return int(thousands * 1024) // shrink

    yield _case("decode 1 x 4k", Lengths(1, (k(4),)), llama)
    yield _case("decode 64 x 4k", Lengths(1, (k(4),) * many), llama)
    yield _case("decode 64 x 4k, pages of 16", Lengths(1, (k(4),) * many), pages16)
    yield _case("decode 64 x 4k, deterministic", Lengths(1, (k(4),) * many), llama, deterministic=True)
    yield _case("decode 512 x 0.5k", Lengths(1, (k(0.5),) * (many * 8)), llama)
    yield _case("decode 32 x 2k to 32k", Lengths(1, ragged(many // 2, k(32))), llama)
    yield _case("decode 1 x 128k", Lengths(1, (k(128),)), llama)
    yield _case("prefill 8k", Lengths(k(8), (k(8),)), llama)
    yield _case("prefill 8k, deterministic", Lengths(k(8), (k(8),)), llama, deterministic=True)
    yield _case("prefill 8 x 1k", Lengths(k(1), (k(1),) * (many // 8 or 1)), llama)
    yield _case("prefill 1k after 15k", Lengths(k(1), (k(16),)), llama)
    small = dataclasses.replace(llama, heads=4 if tiny else 24, kv_heads=2 if tiny else 8, head_dim=64)
    yield _case("prefill 8k, head_dim 64", Lengths(k(8), (k(8),)), small)
    for shared in (1, 8, 32):
        lens = tuple(max(k(shared), 128) + 40 + row for row in range(many))
        yield _case(f"cascade 64 over {shared}k", Lengths(1, lens, max(k(shared), 128)), llama)
    yield _case("decode 64 x 4k", Lengths(1, (k(4),) * many), llama, flex=True)
    yield _case("prefill 8k", Lengths(k(8), (k(8),)), llama, flex=True)
    yield _case("prefill 8k, head_dim 64", Lengths(k(8), (k(8),)), small, flex=True)
