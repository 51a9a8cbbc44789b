"""Sampling of tokens: one pass over the logits; for top-k and top-p, a sort of the pass's candidates."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.arguments.sampling_inputs import SamplingOptions, check_logits, check_mask, check_options
from ramify.kernels.triton.tiles.launch import check_device
from ramify.kernels.triton.tiles.sampling_scan import LOG, RANK, scanned
from ramify.kernels.triton.tiles.sampling_search import search
from ramify.kernels.triton.tiles.sampling_sort import sorted_block
from ramify.kernels.triton.tiles.sampling_tile import (
    LOWEST,
    NOTHING,
    SMALLEST,
    below,
    exp,
    first_beyond,
    load_block,
    number_of,
    token_of,
)


@triton.jit
def _sample_in_id_order(  # type: ignore[no-untyped-def]
    logits_row, mask_row, masked, tops_row, masses, top, temperature, min_p, uniform, vocab, chunks,
    HAS_MASK: tl.constexpr, SUBS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sample in the order of the ids: first the chunk, then the token. With min-p the masses of chunks are
    computed again, without the tokens that min-p excludes."""
    index = tl.arange(0, BLOCK)
    whole = tl.full([SUBS], 1, tl.int1)
    if min_p > 0.0:
        masses = tl.zeros([BLOCK], tl.float64)
        for chunk in range(chunks):
            if exp(tl.load(tops_row + chunk) - top) >= min_p:
                first = chunk * (SUBS * 32)
                x = load_block(logits_row, mask_row, masked, first, vocab, temperature, whole, HAS_MASK, SUBS)
                weight = exp(x - top)
                likely = tl.where(weight >= min_p, weight, 0.0).to(tl.float64)
                masses = tl.where(index == chunk, tl.sum(tl.sum(likely, axis=1), axis=0), masses)
    end = tl.cumsum(masses, 0)
    total = tl.sum(tl.where(index == BLOCK - 1, end, 0.0), 0)
    target = tl.minimum(uniform * total, below(total))
    chunk, before = first_beyond(masses, target, index, BLOCK)
    first = chunk * (SUBS * 32)
    x = load_block(logits_row, mask_row, masked, first, vocab, temperature, whole, HAS_MASK, SUBS)
    if min_p > 0.0:
        weight = exp(x - top)
        mass = tl.where(weight >= min_p, weight, 0.0).to(tl.float64)
    else:
        chunk_top = tl.maximum(tl.load(tops_row + chunk), SMALLEST)
        mass = exp(x - chunk_top).to(tl.float64) * tl.exp((chunk_top - top).to(tl.float64))
    within = tl.arange(0, SUBS * 32)
    place, _ = first_beyond(tl.reshape(mass, [SUBS * 32]), target - before, within, SUBS * 32)
    return first + place


@triton.jit
def _sample_from_candidates(  # type: ignore[no-untyped-def]
    found_row, count, everything, top, total, top_k, top_p, min_p, uniform, vocab, LOG: tl.constexpr
):
    """Sample from the sorted candidates. Returns -1 if the token to be drawn may not be one of them.

    `kept` is the mass of the tokens that top-k keeps. Top-p keeps a token if the cumulative mass before it is
    below top_p * kept.
    """
    rank = tl.arange(0, 2**LOG)
    in_bounds = rank < count
    entry = sorted_block(tl.load(found_row + rank, mask=in_bounds, other=NOTHING), LOG)
    most = tl.where(top_k > 0, tl.minimum(top_k, vocab), vocab)
    weight = exp(tl.where(in_bounds, number_of(entry >> 32), float("-inf")) - top)
    mass = tl.where(rank < most, weight, 0.0).to(tl.float64)
    held = tl.sum(mass, axis=0)
    all_there = everything | (most <= count)
    kept = tl.where(all_there, held, total)
    limit = top_p.to(tl.float64) * kept
    least = tl.min(tl.where(in_bounds, weight, 1.0), axis=0)
    known = (most >= vocab) & (((top_p < 1.0) & (held >= limit)) | ((min_p > 0.0) & (least < min_p)))
    before = tl.cumsum(mass, 0) - mass
    limit = tl.where(top_p < 1.0, limit, float("inf"))
    mass = tl.where((before < limit) & (weight >= min_p), mass, 0.0)
    end = tl.sum(mass, axis=0)
    target = tl.minimum(uniform * end, below(end))
    place, _ = first_beyond(mass, target, rank, 2**LOG)
    drawn = tl.sum(tl.where(rank == place, token_of(entry), 0), axis=0)
    return tl.where(all_there | known, drawn, -1).to(tl.int32)


@triton.jit(do_not_specialize=["rows", "mask_stride", "chunks"])
def _sample(  # type: ignore[no-untyped-def]
    logits_ptr, mask_ptr, mask_row_ptr, options_ptr, top_ptr, id_ptr, mass_ptr, threshold_ptr, count_ptr,
    found_ptr, out_ptr, rows, logits_stride, mask_stride, vocab, chunks,
    HAS_MASK: tl.constexpr, ORDERED: tl.constexpr, LOG: tl.constexpr, SUBS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program r samples the token of row r."""
    row = tl.program_id(0)
    temperature = tl.load(options_ptr + row).to(tl.float32)
    top_k = tl.load(options_ptr + rows + row).to(tl.int32)
    top_p = tl.load(options_ptr + 2 * rows + row).to(tl.float32)
    min_p = tl.load(options_ptr + 3 * rows + row).to(tl.float32)
    uniform = tl.load(options_ptr + 4 * rows + row)
    mask_row = 0
    if HAS_MASK:
        mask_row = tl.load(mask_row_ptr + row)
    logits_row = logits_ptr + row.to(tl.int64) * logits_stride
    words_row = mask_ptr + tl.cast(mask_row, tl.int64) * mask_stride
    masked = mask_row >= 0
    index = tl.arange(0, BLOCK)
    in_bounds = index < chunks
    tops_row = top_ptr + row * chunks
    tops = tl.load(tops_row + index, mask=in_bounds, other=float("-inf"))
    top = tl.max(tops, axis=0)
    token = vocab
    if (temperature > 0.0) & (top > float("-inf")):
        masses = tl.load(mass_ptr + row * chunks + index, mask=in_bounds, other=0.0)
        masses *= tl.exp((tops - top).to(tl.float64))
        token = -1
        straight = True
        if ORDERED:
            straight = (top_k <= 0) & (top_p >= 1.0)
        if straight:
            token = _sample_in_id_order(
                logits_row, words_row, masked, tops_row, masses, top, temperature, min_p, uniform, vocab,
                chunks, HAS_MASK, SUBS, BLOCK,
            )  # fmt: skip
        if ORDERED:  # noqa: SIM102 - decided at compile time, unlike `straight`
            if not straight:
                count = tl.load(count_ptr + row)
                if count <= 2**LOG:
                    everything = tl.load(threshold_ptr + row) == LOWEST
                    token = _sample_from_candidates(
                        found_ptr + row.to(tl.int64) * 2**LOG, count, everything, top,
                        tl.sum(masses, axis=0), top_k, top_p, min_p, uniform, vocab, LOG,
                    )  # fmt: skip
                if token < 0:
                    token = search(
                        logits_row, words_row, masked, tops_row, top, temperature, top_k, top_p, min_p,
                        uniform, vocab, chunks, HAS_MASK, SUBS,
                    )  # fmt: skip
    else:
        ids = tl.load(id_ptr + row * chunks + index, mask=in_bounds, other=vocab)
        token = tl.min(tl.where(in_bounds & (tops == top), ids, vocab), axis=0)
    tl.store(out_ptr + row, tl.minimum(token, vocab - 1).to(tl.int64))  # NaN logits have no maximum


def sample_tokens(
    logits: Tensor,
    options: SamplingOptions,
    mask: Tensor | None = None,
    mask_rows: Tensor | None = None,
) -> Tensor:
    """As `reference.sampling.sample_tokens`. Only launches kernels: no wait."""
    check_device(logits)
    check_logits(logits)
    check_options(logits, options)
    check_mask(logits, mask, mask_rows)
    rows, vocab = logits.shape
    values = options.values
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if mask is not None and mask_rows is None:  # no kernel has a form of its own for this
        mask_rows = torch.arange(rows, dtype=torch.int32, device=logits.device)
    found = scanned(logits, values, mask, mask_rows, rank=RANK if options.ordered else 0)
    masks = logits if mask is None else mask
    _sample[(rows,)](
        logits, masks, out if mask_rows is None else mask_rows, values, found.tops, found.ids, found.masses,
        found.thresholds, found.counts, found.found, out,
        rows, logits.stride(0), masks.stride(0), vocab, found.chunks,
        HAS_MASK=mask is not None, ORDERED=options.ordered, LOG=LOG, SUBS=found.subs, BLOCK=found.block,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return out
