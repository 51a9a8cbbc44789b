"""Mixtures of experts: kernels against the plain torch of `reference.experts`."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ramify.kernels.cpu import experts as compiled
from ramify.kernels.cpu.packed_linear.items import FRAME
from ramify.kernels.reference import experts as reference
from ramify.kernels.registry import ops
from ramify.kernels.weights.packed import PackedWeight, pack
from ramify.kernels.weights.routing import ClampedGate, Routing
from ramify.kernels.weights.rows import Rows, quantised
from ramify.kernels.weights.stack import PackedExperts

HIDDEN, SIZE, SHARED, COUNT = 72, 40, 56, 6
ROUTINGS = {
    "softmax": Routing(top_k=2, normalised=False),
    "normalised": Routing(top_k=3),
    "groups": Routing(top_k=2, scores="sigmoid", groups=3, top_groups=2, scale=1.7),
}


def mixture_of(
    form: str, routing: Routing, *, bias: bool = False, shared: bool = True, clamp: ClampedGate | None = None
) -> PackedExperts:
    generator = torch.Generator().manual_seed(3)

    def matrix(outputs: int, inputs: int, gated: bool = False, form: str = form) -> PackedWeight:
        wide = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        rows = {"f32": Rows, "bf16": lambda wide: Rows(wide.bfloat16())}.get(form)
        laid = quantised(wide, form, 32) if rows is None else rows(wide)  # type: ignore[arg-type]
        vector = torch.randn(outputs, generator=generator) if bias else None
        return pack(laid, inputs=inputs, bias=vector, gated=gated, clamp=clamp if gated else None)

    return PackedExperts(
        routing,
        matrix(COUNT + shared, HIDDEN, form="f32"),
        [matrix(2 * SIZE, HIDDEN, gated=True) for _ in range(COUNT)],
        [matrix(HIDDEN, SIZE) for _ in range(COUNT)],
        correction=torch.randn(COUNT, generator=generator) if routing.scores == "sigmoid" else None,
        shared=(matrix(2 * SHARED, HIDDEN, gated=True), matrix(HIDDEN, SHARED)) if shared else None,
    )


CASES = {
    "float32": (torch.float32, "f32", "softmax", {}),
    "int8, no shared expert": (torch.float32, "int8", "normalised", {"shared": False}),
    "bfloat16, groups": (torch.bfloat16, "bf16", "groups", {}),
    "int4, clamped, with biases": (
        torch.bfloat16,
        "int4",
        "normalised",
        {"bias": True, "clamp": ClampedGate(1.702, 0.8)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_near_the_reference(name: str) -> None:
    dtype, form, routing, options = CASES[name]
    experts = mixture_of(form, ROUTINGS[routing], **options)
    norm = torch.rand(HIDDEN).to(dtype) + 0.5, 1e-5
    for rows in (1, 3, 40):
        x = torch.randn(rows, HIDDEN).to(dtype)
        before = x.clone()
        wanted = reference.expert_block(x, experts, norm=norm, out=x.clone(), add=True).float()
        got = ops("cpu").expert_block(x, experts, norm=norm, out=x, add=True)  # type: ignore[misc]
        assert got is x
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got.float(), wanted, atol=bound, rtol=bound)
        plain = ops("cpu").expert_block(before, experts)  # type: ignore[misc]
        torch.testing.assert_close(
            plain.float(), reference.expert_block(before, experts).float(), atol=bound, rtol=bound
        )


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    experts, x = mixture_of("int4", ROUTINGS["softmax"]), torch.randn(40, HIDDEN).bfloat16()
    block = ops("cpu", deterministic=True).expert_block
    assert block is not None
    whole = block(x, experts)
    for rows in (slice(0, 1), slice(3, 10), slice(17, 40)):
        assert torch.equal(block(x[rows], experts), whole[rows])


def test_only_chosen_experts_are_read() -> None:
    experts, x = mixture_of("f32", ROUTINGS["normalised"]), torch.randn(2, HIDDEN)
    wanted = compiled.expert_block(x, experts)
    logits = x @ reference.linear(torch.eye(HIDDEN), experts.router)
    chosen = set(reference.route(logits[:, :COUNT], experts.routing)[0].flatten().tolist())
    assert 0 < len(chosen) < COUNT
    for index in set(range(COUNT)) - chosen:
        for weight in (experts.gate_up[index], experts.down[index]):
            weight.panels.view(torch.float32).fill_(torch.nan)
    assert torch.equal(compiled.expert_block(x, experts), wanted)
    experts.down[min(chosen)].panels.view(torch.float32).fill_(torch.nan)
    assert compiled.expert_block(x, experts).isnan().any()


def test_each_chosen_expert_is_read_once() -> None:
    """One product of the compiled call has all rows of an expert, whatever their number."""
    experts = mixture_of("f32", ROUTINGS["softmax"], shared=False)
    x = torch.randn(1, HIDDEN).repeat(64, 1)  # all choose the same two experts
    compiled.arena.grow(1 << 12)  # too little: it grows and begins again
    got = compiled.expert_block(x, experts)
    memory, at = compiled.arena.memory, compiled.arena.address
    start = at - memory.ctypes.data
    work = memory[start : start + compiled.WORK.itemsize].view(compiled.WORK)[0]
    start = int(work["end"]) - memory.ctypes.data
    frames = memory[start : start + 2 * FRAME.itemsize].view(FRAME)
    assert frames["rows"].tolist() == [64, 64]
    assert frames["end"].tolist() == [frames[0]["items"], frames["items"].sum()]
    assert frames[0]["total"] == frames["items"].sum()
    assert torch.equal(got, got[:1].expand_as(got))


def test_scores_of_zero_give_no_nan() -> None:
    """Sigmoids of -120 are 0 in float32; the weights are divided by their sum plus 1e-20."""
    logits = torch.full((1, COUNT), -120.0)
    assert reference.route(logits, ROUTINGS["groups"])[1].tolist() == [[0.0, 0.0]]
    experts = mixture_of("f32", ROUTINGS["groups"], shared=False)
    router = pack(Rows(torch.full((COUNT, HIDDEN), -1000.0)), inputs=HIDDEN)
    experts = dataclasses.replace(experts, router=router)
    x = torch.ones(2, HIDDEN)
    assert torch.equal(compiled.expert_block(x, experts), torch.zeros_like(x))
    assert torch.equal(reference.expert_block(x, experts), torch.zeros_like(x))


def test_wrong_arguments_are_refused() -> None:
    experts, x = mixture_of("f32", ROUTINGS["softmax"]), torch.randn(2, HIDDEN)
    block = ops("cpu").expert_block
    assert block is not None
    with pytest.raises(ValueError, match="rows"):
        block(x[:, 1:], experts)
    with pytest.raises(ValueError, match="overlaps"):
        block(x, experts, out=x)
    mixed = dataclasses.replace(
        experts,
        down=[*experts.down[:-1], pack(quantised(torch.randn(HIDDEN, SIZE), "int8", 32), inputs=SIZE)],
    )
    with pytest.raises(ValueError, match="differ"):
        block(x, mixed)
    codes = mixture_of("int4", ROUTINGS["softmax"])
    table = torch.arange(16, dtype=torch.int8)
    mixed = dataclasses.replace(
        codes, down=[*codes.down[:-1], dataclasses.replace(codes.down[-1], table=table)]
    )
    with pytest.raises(ValueError, match="differ"):
        block(x, mixed)
