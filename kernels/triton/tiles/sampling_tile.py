"""Device functions of the sampling kernels: blocks of logits, an integer order of floats, exponentials.

A block is (SUBS, 32): each row is a group, the 32 tokens of one word of the mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = 32
"""Tokens of a group."""
CHUNK = 4096
"""Most tokens of a block: 256 threads with four loads of 16 bytes each, in float32."""

LOWEST = tl.constexpr(-(2**31))
"""A number below the `order` of every logit."""
NOTHING = tl.constexpr(-(2**63))
"""A number below the `packed` entry of every token."""
SMALLEST = tl.constexpr(-3.4028234663852886e38)
"""The number used instead of a maximum of -inf, because -inf minus -inf is NaN."""
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def load_block(  # type: ignore[no-untyped-def]
    logits_row,
    mask_row,
    masked,
    first,
    vocab,
    temperature,
    wanted,
    HAS_MASK: tl.constexpr,
    SUBS: tl.constexpr,
):
    """The logits of a block of tokens from `first`, divided by the temperature. Forbidden tokens and tokens
    beyond the vocabulary have -inf.

    masked : whether the row has a mask
    wanted : (SUBS,) groups to load; the others have -inf
    """
    group, lane = tl.arange(0, SUBS), tl.arange(0, 32)
    token = first + group[:, None] * 32 + lane[None, :]
    loaded = wanted[:, None] & (token < vocab)
    x = tl.where(loaded, tl.load(logits_row + token, mask=loaded).to(tl.float32), -_INFINITY)
    if HAS_MASK:
        in_bounds = wanted & (first + group * 32 < tl.where(masked, vocab, 0))
        word = tl.load(mask_row + first // 32 + group, mask=in_bounds, other=-1)
        x = tl.where((word[:, None] >> lane[None, :]) & 1 == 1, x, -_INFINITY)
    if temperature != 1.0:  # a rounded division is ten instructions
        x = tl.div_rn(x, tl.zeros_like(x) + temperature)
    return x


@triton.jit
def block_tokens(first, SUBS: tl.constexpr):  # type: ignore[no-untyped-def]
    return first + tl.arange(0, SUBS)[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def order(x):  # type: ignore[no-untyped-def]
    """An int64 of at least -2**31 that is ordered as the float32 x; both zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def packed(x, token):  # type: ignore[no-untyped-def]
    """An int64 of x and token: in descending order, larger x come first and, among equals, lower tokens."""
    return order(x) * 4294967296 + (4294967295 - token.to(tl.int64))


@triton.jit
def token_of(entry):  # type: ignore[no-untyped-def]
    """The int64 token of a `packed` entry."""
    return 4294967295 - (entry & 4294967295)


@triton.jit
def number_of(key):  # type: ignore[no-untyped-def]
    """The number whose `order` is key."""
    low = key.to(tl.int32)
    return (low ^ ((low >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def exp(x):  # type: ignore[no-untyped-def]
    """e**x for x <= 0: 2**(x log2 e), corrected for the rounding of the product. Exactly 1 at 0. 0 below -87,
    where float32 numbers become subnormal, which GPUs flush to 0."""
    bounded = tl.maximum(x, -88.0)
    power = bounded * 1.4426950408889634
    rest = tl.fma(bounded, 1.4426950408889634, -power) + bounded * 1.9259629911e-8
    y = tl.exp2(power)
    return tl.where(x < -87.0, 0.0, y + y * rest * 0.6931471805599453)


@triton.jit
def below(total):  # type: ignore[no-untyped-def]
    """The largest float64 below `total`, which is positive."""
    return (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)


@triton.jit
def first_beyond(mass, target, index, none):  # type: ignore[no-untyped-def]
    """The first index at which the cumulative mass passes `target`, and the mass before that index.

    If by rounding none passes, the last index with a mass above 0. `none` is a number above all indices.
    """
    end = tl.cumsum(mass, 0)
    found = tl.min(tl.where((end > target) & (mass > 0.0), index, none), 0)
    last = tl.max(tl.where(mass > 0.0, index, 0), 0)
    found = tl.where(found < none, found, last)
    return found, tl.sum(tl.where(index == found, end - mass, 0.0), 0)
