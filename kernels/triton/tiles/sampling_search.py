"""Sampling with top-k or top-p when the candidates are not enough: bounds found by bisection over the row.

For flat distributions, a top-k above the number of candidates, and logits with more ties than candidates.
Each step of a bisection reads the chunks that reach the bound; a row of 128k logits takes about 96 steps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ramify.kernels.triton.tiles.sampling_tile import (
    LOWEST,
    below,
    block_tokens,
    exp,
    load_block,
    number_of,
    order,
)


@triton.jit
def _amount(  # type: ignore[no-untyped-def]
    key, logits_row, mask_row, masked, tops_row, top, temperature, vocab, chunks,
    COUNT: tl.constexpr, HAS_MASK: tl.constexpr, SUBS: tl.constexpr,
):  # fmt: skip
    """The float64 mass of tokens at order `key` or above; with COUNT, the number of those above -inf."""
    acc = tl.zeros([SUBS, 32], tl.float64)
    whole = tl.full([SUBS], 1, tl.int1)
    for chunk in range(chunks):
        if order(tl.load(tops_row + chunk)) >= key:
            x = load_block(
                logits_row, mask_row, masked, chunk * (SUBS * 32), vocab, temperature, whole, HAS_MASK, SUBS
            )
            weight = tl.where(x > float("-inf"), 1.0, 0.0) if COUNT else exp(x - top)
            acc += tl.where(order(x) >= key, weight, 0.0).to(tl.float64)
    return tl.sum(tl.sum(acc, axis=1), axis=0)


@triton.jit
def _bound(  # type: ignore[no-untyped-def]
    target, logits_row, mask_row, masked, tops_row, top, temperature, vocab, chunks,
    STRICT: tl.constexpr, COUNT: tl.constexpr, HAS_MASK: tl.constexpr, SUBS: tl.constexpr,
):  # fmt: skip
    """The highest order at or above which the `_amount` reaches (STRICT: exceeds) the target.

    Returns the order, the amount above it, and the weight of a token of that order.
    """
    key = tl.full([], LOWEST, tl.int64)
    step = tl.full([], 2147483648, tl.int64)
    for _ in range(32):
        amount = _amount(
            key + step, logits_row, mask_row, masked, tops_row, top, temperature, vocab, chunks,
            COUNT, HAS_MASK, SUBS,
        )  # fmt: skip
        enough = amount > target if STRICT else amount >= target
        key = tl.where(enough, key + step, key)
        step = step // 2
    above = _amount(
        key + 1, logits_row, mask_row, masked, tops_row, top, temperature, vocab, chunks,
        COUNT, HAS_MASK, SUBS,
    )  # fmt: skip
    return key, above, exp(number_of(key) - top).to(tl.float64)


@triton.jit
def _nth(  # type: ignore[no-untyped-def]
    key, nth, logits_row, mask_row, masked, tops_row, temperature, vocab, chunks,
    HAS_MASK: tl.constexpr, SUBS: tl.constexpr,
):  # fmt: skip
    """The token number `nth`, from 0, among the tokens of order `key`; the last one if there are fewer."""
    token = tl.full([], 0, tl.int32)
    seen = tl.full([], 0, tl.int32)
    whole = tl.full([SUBS], 1, tl.int1)
    for chunk in range(chunks):
        if (seen <= nth) & (order(tl.load(tops_row + chunk)) >= key):
            first = chunk * (SUBS * 32)
            x = load_block(logits_row, mask_row, masked, first, vocab, temperature, whole, HAS_MASK, SUBS)
            equal = tl.reshape((order(x) == key).to(tl.int32), [SUBS * 32])
            place = seen + tl.cumsum(equal, 0) - 1
            tokens = tl.reshape(block_tokens(first, SUBS), [SUBS * 32])
            token = tl.maximum(token, tl.max(tl.where((equal == 1) & (place <= nth), tokens, 0), 0))
            seen += tl.sum(equal, axis=0)
    return token


@triton.jit
def search(  # type: ignore[no-untyped-def]
    logits_row, mask_row, masked, tops_row, top, temperature, top_k, top_p, min_p, uniform, vocab, chunks,
    HAS_MASK: tl.constexpr, SUBS: tl.constexpr,
):  # fmt: skip
    """Sample the token of one row. The tokens that can be sampled are a prefix of the descending order."""
    lowest = tl.full([], LOWEST, tl.int64)
    whole = _amount(
        lowest, logits_row, mask_row, masked, tops_row, top, temperature, vocab, chunks,
        False, HAS_MASK, SUBS,
    )  # fmt: skip
    kept = whole
    if (top_k > 0) & (top_k < vocab):
        count = _amount(
            lowest, logits_row, mask_row, masked, tops_row, top, temperature, vocab, chunks,
            True, HAS_MASK, SUBS,
        )  # fmt: skip
        if count > top_k:
            key, above, weight = _bound(
                top_k.to(tl.float64), logits_row, mask_row, masked, tops_row, top, temperature, vocab, chunks,
                False, True, HAS_MASK, SUBS,
            )  # fmt: skip
            mass = _amount(
                key + 1, logits_row, mask_row, masked, tops_row, top, temperature, vocab, chunks,
                False, HAS_MASK, SUBS,
            )  # fmt: skip
            kept = mass + (top_k - above) * weight
    total = kept
    if top_p < 1.0:
        limit = top_p.to(tl.float64) * kept
        key, above, weight = _bound(
            limit, logits_row, mask_row, masked, tops_row, top, temperature, vocab, chunks,
            False, False, HAS_MASK, SUBS,
        )  # fmt: skip
        total = tl.minimum(total, above + tl.maximum(tl.ceil((limit - above) / weight), 1.0) * weight)
    if min_p > 0.0:
        likely = tl.zeros([SUBS, 32], tl.float64)
        every = tl.full([SUBS], 1, tl.int1)
        for chunk in range(chunks):
            if exp(tl.load(tops_row + chunk) - top) >= min_p:
                first = chunk * (SUBS * 32)
                x = load_block(logits_row, mask_row, masked, first, vocab, temperature, every, HAS_MASK, SUBS)
                weight_of = exp(x - top)
                likely += tl.where(weight_of >= min_p, weight_of, 0.0).to(tl.float64)
        total = tl.minimum(total, tl.sum(tl.sum(likely, axis=1), axis=0))
    target = tl.minimum(uniform * total, below(total))
    key, above, weight = _bound(
        target, logits_row, mask_row, masked, tops_row, top, temperature, vocab, chunks,
        True, False, HAS_MASK, SUBS,
    )  # fmt: skip
    nth = tl.maximum(tl.floor((target - above) / weight), 0.0).to(tl.int32)
    return _nth(key, nth, logits_row, mask_row, masked, tops_row, temperature, vocab, chunks, HAS_MASK, SUBS)
