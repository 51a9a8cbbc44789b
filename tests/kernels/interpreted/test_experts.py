"""Mixtures of experts in Triton's interpreter: right, and the same launches whatever the choice."""

from __future__ import annotations

import pytest
import torch

from ramify.kernels.reference import experts as reference
from ramify.kernels.triton import experts
from ramify.kernels.weights.routing import ClampedGate
from ramify.kernels.weights.stack import ExpertMatrices

COUNT, HIDDEN, SIZE = 5, 72, 40


def matrices(dtype: torch.dtype, *, gpt_oss: bool = False) -> ExpertMatrices:
    parts = [torch.randn(COUNT, 2 * SIZE, HIDDEN) / HIDDEN**0.5, torch.randn(COUNT, HIDDEN, SIZE) / SIZE**0.5]
    if gpt_oss:
        parts += [torch.randn(COUNT, 2 * SIZE), torch.randn(COUNT, HIDDEN)]
    return ExpertMatrices(
        *(part.to(dtype) for part in parts), clamp=ClampedGate(1.702, 0.8) if gpt_oss else None
    )


def choice(rows: int, top_k: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.rand(rows, COUNT).topk(top_k).indices.int()
    return chosen, torch.rand(rows, top_k)


@pytest.mark.parametrize(
    ("rows", "dtype", "gpt_oss"), [(2, torch.float32, True), (66, torch.float16, False)], ids=str
)
def test_it_is_near_the_reference(rows: int, dtype: torch.dtype, gpt_oss: bool) -> None:
    x, routed, weights = torch.randn(rows, HIDDEN).to(dtype), choice(rows), matrices(dtype, gpt_oss=gpt_oss)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    wanted, out = reference.mixture(x, *routed, weights), x.clone()
    if gpt_oss:
        wanted = wanted + x
        assert experts.mixture(x, *routed, weights, out=out, add=True) is out
    else:
        out = experts.mixture(x, *routed, weights)
    torch.testing.assert_close(out, wanted, atol=bound, rtol=bound)


def test_the_launches_do_not_depend_on_the_choice(launches) -> None:
    x, weights, seen = torch.randn(6, HIDDEN), matrices(torch.float32), []
    one = torch.tensor([[3, 1]], dtype=torch.int32).repeat(6, 1)
    for chosen in (one, choice(6)[0]):
        launches.clear()
        got = experts.mixture(x, chosen, torch.ones(6, 2), weights)
        torch.testing.assert_close(
            got, reference.mixture(x, chosen, torch.ones(6, 2), weights), atol=1e-4, rtol=0
        )
        seen.append([(launch.kernel, launch.grid) for launch in launches])
    assert len(seen[0]) == 5
    assert seen[0] == seen[1]


def test_experts_that_are_not_chosen_are_not_read() -> None:
    x, weights = torch.randn(3, HIDDEN), matrices(torch.float32)
    chosen = torch.tensor([[0, 4], [4, 0], [0, 1]], dtype=torch.int32)
    wanted = experts.mixture(x, chosen, torch.ones(3, 2), weights)
    weights.gate_up[2:4], weights.down[2:4] = torch.nan, torch.nan
    assert torch.equal(experts.mixture(x, chosen, torch.ones(3, 2), weights), wanted)
    weights.down[1] = torch.nan
    assert experts.mixture(x, chosen, torch.ones(3, 2), weights).isnan().any()


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    x, weights, (chosen, shares) = torch.randn(20, HIDDEN).half(), matrices(torch.float16), choice(20)
    whole = experts.mixture(x, chosen, shares, weights, by_row=True)
    for rows in (slice(0, 1), slice(3, 9)):
        alone = experts.mixture(x[rows], chosen[rows], shares[rows], weights, by_row=True)
        assert torch.equal(alone, whole[rows])


@pytest.mark.parametrize("module", [reference, experts], ids=["twin", "kernel"])
def test_refusals_name_the_argument(module: object) -> None:
    x, routed, weights = torch.randn(3, HIDDEN), choice(3), matrices(torch.float32)
    with pytest.raises(ValueError, match="x is"):
        module.mixture(x[:, 1:], *routed, weights)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="chosen is"):
        module.mixture(x, routed[0].long(), routed[1], weights)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="gate_up is"):
        module.mixture(x, *routed, matrices(torch.float16))  # type: ignore[attr-defined]
