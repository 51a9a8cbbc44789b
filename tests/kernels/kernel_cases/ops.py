"""Norms, activation, rotary store, page copies and sampling: all bound by bandwidth, beside plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from ramify.kernels.arguments.sampling_inputs import SamplingOptions
from ramify.kernels.reference import sampling as reference
from ramify.kernels.triton import activation, kv_store, logits, matmul, norm, rope, sampling
from tests.kernels.kernel_cases.base import Case, Work, family, half

_HEADS, _KV_HEADS, _DIM, _PAGE = 32, 8, 128, 64


def _poison(*outputs: torch.Tensor) -> None:
    for output in outputs:
        output.fill_(torch.nan)


def _norm(device: torch.device, tokens: int, size: int) -> Work:
    x = torch.randn(tokens, size, dtype=half(device), device=device)
    weight, out = torch.randn_like(x[0]), torch.empty_like(x)
    torchs = {"torch": lambda: F.rms_norm(x, (size,), weight, 1e-5)}
    run = partial(norm.rms_norm, x, weight, 1e-5, out=out)
    return Work(run, 2 * x.nbytes, rivals=torchs, reset=partial(_poison, out))


def _add_norm(device: torch.device, tokens: int, size: int) -> Work:
    x = torch.randn(tokens, size, dtype=half(device), device=device)
    residual, weight, out = torch.randn_like(x), torch.randn_like(x[0]), torch.empty_like(x)
    first = residual.clone()

    def run() -> None:
        norm.add_rms_norm(x, residual, weight, 1e-5, out=out)

    def torchs() -> torch.Tensor:
        residual.add_(x)
        return F.rms_norm(residual, (size,), weight, 1e-5)

    def reset() -> None:
        _poison(out)
        residual.copy_(first)

    return Work(
        run,
        4 * x.nbytes,
        rivals={"torch": torchs},
        checks={"torch": lambda: torch.cat([torchs(), residual])},
        reset=reset,
        result=lambda: torch.cat([out, residual]),
    )


def _gated(device: torch.device, tokens: int, size: int) -> Work:
    x = torch.randn(tokens, 2 * size, dtype=half(device), device=device)
    out = torch.empty(tokens, size, dtype=x.dtype, device=device)
    torchs = {"torch": lambda: F.silu(x[:, :size]) * x[:, size:]}
    run = partial(activation.silu_mul, x, out=out)
    return Work(run, x.nbytes + out.nbytes, rivals=torchs, reset=partial(_poison, out))


def _rope(device: torch.device, tokens: int, *, norms: bool) -> Work:
    dtype = half(device)
    qkv = torch.randn(tokens, _HEADS + 2 * _KV_HEADS, _DIM, dtype=dtype, device=device)
    q, k, v = qkv.split([_HEADS, _KV_HEADS, _KV_HEADS], dim=1)
    turn = torch.polar(
        torch.ones(tokens, _DIM // 2, device=device), torch.randn(tokens, _DIM // 2, device=device)
    )
    num_pages = -(-tokens // _PAGE)
    k_pages, v_pages = torch.empty(2, num_pages, _KV_HEADS, _PAGE, _DIM, dtype=dtype, device=device)
    slots = torch.arange(tokens, device=device)
    weight = (
        torch.randn(_DIM, device=device).sign().to(dtype)
    )  # q is overwritten, and neither grows nor fades
    page, row, first = slots // _PAGE, slots % _PAGE, q.clone()
    given = {"q_norm": weight, "k_norm": weight} if norms else {}

    def run() -> None:
        rope.rope_store_kv(q, k, v, turn, k_pages, v_pages, slots, **given)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        if norms:
            x = F.rms_norm(x, (_DIM,), weight, 1e-6)
        pairs = torch.view_as_complex(x.float().view(*x.shape[:2], -1, 2))
        return torch.view_as_real(pairs * turn[:, None]).flatten(2).to(dtype)

    def torchs() -> None:
        k_pages[page, :, row] = rotated(k)
        v_pages[page, :, row] = v
        q.copy_(rotated(q))

    def reset() -> None:
        _poison(k_pages, v_pages)
        q.copy_(first)

    # q, k and v are read, each is written once, and so is a rotation a token read.
    return Work(
        run,
        2 * qkv.nbytes + turn.nbytes + slots.nbytes,
        rivals={"torch": torchs},
        reset=reset,
        result=lambda: torch.cat([q, k_pages[page, :, row], v_pages[page, :, row]], dim=1),
    )


def _copies(device: torch.device, layers: int, count: int) -> Work:
    shape = (layers, 2 * count, _KV_HEADS, _PAGE, _DIM)
    k, v = (torch.randn(shape, device=device).to(half(device)) for _ in range(2))
    src, dst = list(range(count)), list(range(count, 2 * count))
    index = torch.tensor([src, dst], device=device)
    pages = kv_store.listed(src, dst, device)  # a graph may be captured: nothing is copied from the host

    def torchs() -> None:
        for pages in (k, v):
            pages[:, index[1]] = pages[:, index[0]]

    copied = k[:, count:], v[:, count:]
    return Work(
        lambda: kv_store.copy_listed(k, v, pages),
        k.nbytes + v.nbytes,
        rivals={"torch": torchs},
        reset=partial(_poison, *copied),
        result=lambda: torch.cat(copied),
    )


def _draws(
    device: torch.device,
    rows: int,
    vocab: int,
    *,
    masked: bool = False,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Work:
    """Torch draws with numbers of its own, so the tokens differ, and are checked by the twin; for top-p it
    sorts."""
    x = 3 * torch.randn(rows, vocab, device=device)
    x = x.to(half(device))
    columns = [[value] * rows for value in (temperature, top_k, top_p, 0.0)]
    options = SamplingOptions.from_columns(*columns, torch.rand(rows).tolist(), device)
    words = (rows, -(-vocab // 32))
    mask = torch.randint(-(1 << 31), 1 << 31, words, dtype=torch.int32, device=device) if masked else None

    def torchs() -> torch.Tensor:
        y = x.float()
        if temperature == 0.0:
            return torch.argmax(y, dim=-1)
        if top_k or top_p < 1.0:
            y, ids = torch.topk(y, top_k, dim=-1) if top_k else torch.sort(y, dim=-1, descending=True)
            probs = torch.softmax(y, dim=-1)
            probs = torch.where(torch.cumsum(probs, -1) - probs < top_p, probs, 0.0)
            return ids.gather(1, torch.multinomial(probs, 1))
        return torch.multinomial(torch.softmax(y, dim=-1), 1)

    rivals = {} if masked else {"torch": torchs}
    moved = x.nbytes + (0 if mask is None else mask.nbytes)
    twin = partial(reference.sample_tokens, x, options, mask)
    return Work(
        partial(sampling.sample_tokens, x, options, mask), moved, rivals=rivals, checks={"twin": twin}
    )


def _log_probabilities(device: torch.device, rows: int, vocab: int, top: int) -> Work:
    x = 3 * torch.randn(rows, vocab, device=device)
    x = x.to(half(device))
    tokens = torch.randint(vocab, (rows,), device=device)

    def torchs() -> torch.Tensor:
        wide = torch.log_softmax(x.float(), dim=-1)
        torch.topk(wide, top, dim=-1)
        return wide.gather(1, tokens[:, None])

    return Work(
        lambda: logits.log_probabilities(x, tokens, top).chosen[:, None], x.nbytes, rivals={"torch": torchs}
    )


def _product(device: torch.device, rows: int, outputs: int, inputs: int) -> Work:
    """The product of the deterministic mode; torch's own takes another order for another number of rows."""
    x = torch.randn(rows, inputs, device=device).to(half(device))
    weight = (torch.randn(outputs, inputs, device=device) / inputs**0.5).to(x.dtype)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=device)
    return Work(
        partial(matmul.matmul, x, weight, out=out),
        x.nbytes + weight.nbytes + out.nbytes,
        flop=2 * rows * outputs * inputs,
        rivals={"torch": lambda: F.linear(x, weight)},
        reset=partial(_poison, out),
    )


@family
def ops(tiny: bool) -> Iterator[Case]:
    tokens, rows, vocab = (6, 3, 1024) if tiny else (4096, 256, 128256)
    small = 2 if tiny else 64
    size, inner = (64, 96) if tiny else (4096, 14336)
    yield Case(f"norm {tokens} x {size}", lambda device: _norm(device, tokens, size))
    yield Case(f"add + norm {tokens} x {size}", lambda device: _add_norm(device, tokens, size))
    yield Case(f"silu * up {tokens} x {inner}", lambda device: _gated(device, tokens, inner))
    yield Case(f"rope + store {tokens}", lambda device: _rope(device, tokens, norms=False))
    yield Case(f"norms + rope + store {tokens}", lambda device: _rope(device, tokens, norms=True))
    yield Case(f"rope + store {small}", lambda device: _rope(device, small, norms=False))
    yield Case("copy pages, 32 layers", lambda device: _copies(device, 2 if tiny else 32, small))
    for count in (small, rows):
        yield Case(f"greedy {count}", lambda device, n=count: _draws(device, n, vocab, temperature=0.0))
        yield Case(f"draw {count}", lambda device, n=count: _draws(device, n, vocab))
        yield Case(f"draw {count}, masked", lambda device, n=count: _draws(device, n, vocab, masked=True))
        yield Case(f"draw {count}, top-k 50", lambda device, n=count: _draws(device, n, vocab, top_k=50))
        yield Case(f"draw {count}, top-p 0.9", lambda device, n=count: _draws(device, n, vocab, top_p=0.9))
    for count in (1, small, tokens):
        case = f"deterministic product {count} x {inner} x {size}"
        yield Case(case, lambda device, n=count: _product(device, n, inner, size))
    yield Case(
        f"log-probabilities {rows}, top 20", lambda device: _log_probabilities(device, rows, vocab, 20)
    )
