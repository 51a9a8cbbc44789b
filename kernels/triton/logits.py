"""Edits and log-probabilities of logits, without a copy of the logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.arguments.sampling_inputs import (
    LogitEdits,
    LogProbabilities,
    check_chosen,
    check_edits,
    check_logits,
)
from ramify.kernels.triton.tiles.launch import check_device
from ramify.kernels.triton.tiles.sampling_scan import LOG, scanned
from ramify.kernels.triton.tiles.sampling_sort import sorted_block
from ramify.kernels.triton.tiles.sampling_tile import (
    LOWEST,
    NOTHING,
    SMALLEST,
    block_tokens,
    load_block,
    number_of,
    packed,
    token_of,
)

_EDITS = 256
"""Edits of a program."""


@triton.jit(do_not_specialize=["count"])
def _edit(  # type: ignore[no-untyped-def]
    logits_ptr, place_ptr, amount_ptr, before_ptr, count, logits_stride,
    RESTORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = index < count
    row = tl.load(place_ptr + index, mask=in_bounds, other=0).to(tl.int64)
    at = logits_ptr + row * logits_stride + tl.load(place_ptr + count + index, mask=in_bounds, other=0)
    if RESTORE:
        tl.store(at, tl.load(before_ptr + index, mask=in_bounds), mask=in_bounds)
    else:
        before = tl.load(at, mask=in_bounds)
        tl.store(before_ptr + index, before, mask=in_bounds)
        repetition = tl.load(amount_ptr + index, mask=in_bounds, other=1.0)
        x = before.to(tl.float32)
        x = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
        x -= tl.load(amount_ptr + count + index, mask=in_bounds, other=0.0)
        x += tl.load(amount_ptr + 2 * count + index, mask=in_bounds, other=0.0)
        tl.store(at, x.to(logits_ptr.dtype.element_ty), mask=in_bounds)


@triton.jit
def _next_best(  # type: ignore[no-untyped-def]
    bound, logits_row, tops_row, vocab, chunks, SUBS: tl.constexpr
):
    """The highest `packed` token below `bound`, or NOTHING."""
    best = tl.full([SUBS, 32], NOTHING, tl.int64)
    whole = tl.full([SUBS], 1, tl.int1)
    for chunk in range(chunks):
        first = chunk * (SUBS * 32)
        x = load_block(logits_row, logits_row, False, first, vocab, 1.0, whole, False, SUBS)
        entry = packed(x, block_tokens(first, SUBS))
        best = tl.maximum(best, tl.where((entry < bound) & (x > float("-inf")), entry, NOTHING))
    return tl.max(tl.max(best, axis=1), axis=0)


@triton.jit(do_not_specialize=["top", "chunks"])
def _finish(  # type: ignore[no-untyped-def]
    logits_ptr, token_ptr, top_ptr, mass_ptr, threshold_ptr, count_ptr, found_ptr,
    chosen_ptr, out_id_ptr, out_value_ptr, top, logits_stride, vocab, chunks,
    RANKED: tl.constexpr, LOG: tl.constexpr, SUBS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program r: the log-probability of row r's chosen token, and the row's `top` best tokens."""
    row = tl.program_id(0)
    logits_row = logits_ptr + row.to(tl.int64) * logits_stride
    index = tl.arange(0, BLOCK)
    in_bounds = index < chunks
    tops = tl.load(top_ptr + row * chunks + index, mask=in_bounds, other=float("-inf"))
    highest = tl.maximum(tl.max(tops, axis=0), SMALLEST)
    masses = tl.load(mass_ptr + row * chunks + index, mask=in_bounds, other=0.0)
    masses *= tl.exp((tops - highest).to(tl.float64))
    normaliser = highest.to(tl.float64) + tl.log(tl.sum(masses, axis=0))
    x = tl.load(logits_row + tl.load(token_ptr + row)).to(tl.float32)
    tl.store(chosen_ptr + row, (x.to(tl.float64) - normaliser).to(tl.float32))
    if RANKED:
        out_id, out_value = out_id_ptr + row.to(tl.int64) * top, out_value_ptr + row.to(tl.int64) * top
        count = tl.load(count_ptr + row)
        everything = tl.load(threshold_ptr + row) == LOWEST
        if (count <= 2**LOG) & (everything | (count >= top)):
            rank = tl.arange(0, 2**LOG)
            found_row = found_ptr + row.to(tl.int64) * 2**LOG
            entry = sorted_block(tl.load(found_row + rank, mask=rank < count, other=NOTHING), LOG)
            value = tl.where(rank < count, number_of(entry >> 32), float("-inf")).to(tl.float64)
            tl.store(out_id + rank, tl.where(rank < count, token_of(entry), -1), mask=rank < top)
            tl.store(out_value + rank, (value - normaliser).to(tl.float32), mask=rank < top)
        else:
            bound = tl.full([], 2**63 - 1, tl.int64)
            for place in range(top):
                bound = _next_best(bound, logits_row, top_ptr + row * chunks, vocab, chunks, SUBS)
                alive = bound > NOTHING
                logit = tl.where(alive, number_of(bound >> 32), float("-inf")).to(tl.float64)
                tl.store(out_id + place, tl.where(alive, token_of(bound), -1))
                tl.store(out_value + place, (logit - normaliser).to(tl.float32))


def edit_logits(logits: Tensor, edits: LogitEdits) -> Tensor:
    """As `reference.logits.edit_logits`."""
    check_device(logits)
    check_logits(logits)
    check_edits(logits, edits)
    before = torch.empty(edits.places.shape[1], dtype=logits.dtype, device=logits.device)
    _run_edit(logits, edits, before, restore=False)
    return before


def restore_logits(logits: Tensor, edits: LogitEdits, before: Tensor) -> None:
    """As `reference.logits.restore_logits`."""
    check_device(logits)
    check_logits(logits)
    check_edits(logits, edits, before)
    _run_edit(logits, edits, before, restore=True)


def _run_edit(logits: Tensor, edits: LogitEdits, before: Tensor, *, restore: bool) -> None:
    count = len(before)
    if not count:
        return
    _edit[(triton.cdiv(count, _EDITS),)](
        logits, edits.places, edits.amounts, before, count, logits.stride(0),
        RESTORE=restore, BLOCK=_EDITS, num_warps=_EDITS // 32, enable_fp_fusion=False,
    )  # fmt: skip


def log_probabilities(logits: Tensor, tokens: Tensor, top: int) -> LogProbabilities:
    """As `reference.logits.log_probabilities`.

    Reads the logits once, in their own dtype, and the groups of the most likely tokens a second time.
    """
    check_device(logits)
    check_logits(logits)
    check_chosen(logits, tokens, top)
    rows, vocab = logits.shape
    top = min(top, vocab)
    found = scanned(logits, None, None, None, rank=top)
    chosen = torch.empty(rows, dtype=torch.float32, device=logits.device)
    values = torch.empty((rows, top), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, top), dtype=torch.int64, device=logits.device)
    _finish[(rows,)](
        logits, tokens, found.tops, found.masses, found.thresholds, found.counts, found.found,
        chosen, ids, values, top, logits.stride(0), vocab, found.chunks,
        RANKED=top > 0, LOG=LOG, SUBS=found.subs, BLOCK=found.block,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return LogProbabilities(chosen, ids, values)
