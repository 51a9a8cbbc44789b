"""The Triton attention on a GPU: float16 and bfloat16 against torch at the same dtype, large shapes, bits."""

from __future__ import annotations

import pytest
import torch

from ramify.kernels.triton import attention
from ramify.kernels.triton.attention import plan_attention, plan_shape, run_plan
from ramify.kernels.triton.plan.attention_graph import Form, StaticPlan, launches_of
from tests.kernels.attention_cases import Batch, make_batch
from tests.kernels.cascade_cases import assert_as_good

BF16 = torch.bfloat16
MIXED = [(1, 1), (1, 300), (50, 50), (37, 1290), (0, 5), (3, 130), (1, 64), (300, 700), (1, 5000)]


def on_gpu(batch: Batch) -> Batch:
    return Batch(*(tensor.cuda() for tensor in batch))


def check(batch: Batch, **options) -> torch.Tensor:
    options.setdefault("scale", batch.q.shape[-1] ** -0.5)
    out = torch.full_like(batch.q, torch.nan)
    attention.paged_attention(*batch, **options, out=out)
    options.pop("deterministic", None)
    assert_as_good(out, batch, **options)
    return out


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [*((dim, BF16) for dim in (64, 80, 96, 128, 256)), (128, torch.float16), (64, torch.float32)],
    ids=str,
)
def test_head_dims(head_dim, dtype, deterministic):
    batch = on_gpu(make_batch(MIXED, head_dim=head_dim, heads=8, kv_heads=2, dtype=dtype))
    check(batch, deterministic=deterministic)


@pytest.mark.parametrize("page_size", [1, 3, 16, 32, 64, 128])
def test_page_sizes(page_size):
    batch = make_batch(MIXED, page_size=page_size, heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    batch = on_gpu(batch)
    check(batch)
    if page_size in (3, 64):
        check(batch, deterministic=True)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (32, 8), (24, 1), (71, 1), (131, 1)])
def test_head_groups(heads, kv_heads):
    lengths = [(1, 1), (1, 700), (50, 50), (3, 130)]
    check(on_gpu(make_batch(lengths, heads=heads, kv_heads=kv_heads, head_dim=64, dtype=torch.bfloat16)))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [0, 128])
def test_sinks(window, deterministic):
    batch = on_gpu(make_batch(MIXED, heads=8, kv_heads=2, dtype=torch.bfloat16))
    sinks = torch.linspace(-4.0, 6.0, 8, device="cuda")
    check(batch, window=window, deterministic=deterministic, sinks=sinks)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("window", "soft_cap"), [(1, 0.0), (100, 0.0), (1000, 0.0), (0, 2.0), (70, 30.0)])
def test_windows_and_soft_caps(window, soft_cap, deterministic):
    batch = on_gpu(make_batch(MIXED, heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16))
    check(batch, window=window, soft_cap=soft_cap, deterministic=deterministic)


@pytest.mark.parametrize(("batch_size", "longest"), [(1, 4000), (7, 4000), (64, 2000), (512, 500)])
def test_decode_batches(batch_size, longest):
    lengths = [(1, 1 + (1313 * (row + 3)) % longest) for row in range(batch_size)]
    check(on_gpu(make_batch(lengths, heads=16, kv_heads=4, head_dim=128, dtype=torch.bfloat16)))


def test_a_long_ragged_batch():
    batch = on_gpu(make_batch([(1, 131072), (1, 3), (64, 40000)], heads=8, kv_heads=2, dtype=torch.bfloat16))
    check(batch)
    shape = plan_shape(batch.q, batch.k_pages, window=0, deterministic=False)
    assert plan_attention(batch.query_starts.tolist(), batch.kv_lens.tolist(), shape, batch.q.device).merge


def test_large_prefills():
    check(on_gpu(make_batch([(3000, 3000), (1, 1), (1500, 4000)], heads=8, kv_heads=2, dtype=torch.bfloat16)))


def part(batch: Batch, low: int, high: int) -> Batch:
    """Tokens [low, high) of a batch of one sequence prefilled whole."""
    return batch._replace(
        q=batch.q[low:high],
        query_starts=torch.tensor([0, high - low], dtype=torch.int32, device="cuda"),
        kv_lens=torch.tensor([high], dtype=torch.int32, device="cuda"),
    )


@pytest.mark.parametrize(
    ("head_dim", "dtype", "window"),
    [(64, BF16, 0), (128, BF16, 0), (128, BF16, 700), (128, torch.float16, 0)],
    ids=str,
)
def test_deterministic_bits_depend_on_the_row_alone(head_dim, dtype, window):
    """The bits are those of a whole prefill: in chunks and token by token, alone and in a batch, with and
    without parts."""
    whole = on_gpu(make_batch([(2500, 2500)], heads=8, kv_heads=2, head_dim=head_dim, dtype=dtype))
    options = {"scale": 0.1, "window": window, "deterministic": True}
    expected = attention.paged_attention(*whole, **options)
    for low, high in ((0, 1), (511, 513), (100, 1100), (1023, 1025), (2499, 2500), (2000, 2500)):
        assert torch.equal(attention.paged_attention(*part(whole, low, high), **options), expected[low:high])
    table = whole.page_table.expand(3, -1).contiguous()
    mixed = whole._replace(
        q=torch.cat([whole.q[2499:], whole.q[1000:1300], whole.q[77:78]]),
        page_table=table,
        query_starts=torch.tensor([0, 1, 301, 302], dtype=torch.int32, device="cuda"),
        kv_lens=torch.tensor([2500, 1300, 78], dtype=torch.int32, device="cuda"),
    )
    together = attention.paged_attention(*mixed, **options)
    assert torch.equal(together, torch.cat([expected[2499:], expected[1000:1300], expected[77:78]]))


def test_two_runs_give_the_same_bits():
    batch = on_gpu(make_batch(MIXED, heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16))
    first = attention.paged_attention(*batch, scale=0.1)
    for _ in range(20):
        assert torch.equal(attention.paged_attention(*batch, scale=0.1), first)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_captured_step_is_replayed_with_new_lengths(deterministic):
    """Running a plan neither waits nor transfers, and padding writes nothing."""
    batch = on_gpu(make_batch([(1, 900), (1, 5000)], heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16))
    shape = plan_shape(batch.q, batch.k_pages, window=0, deterministic=deterministic)
    forms = launches_of(shape, Form(6, 4), 4)
    static = StaticPlan(shape, batch.q.device, tokens=4, forms=forms, states=500)
    q = torch.full((4, 8, 128), torch.nan, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)

    def step() -> None:
        run_plan(static.plan, q, *batch[1:4], out, scale=0.1)

    def load(lens: list[int]) -> None:
        assert static.load(plan_attention([0, 1, 2], lens, shape, torch.device("cpu")))

    load([1, 1])
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lens in ([900, 5000], [30, 4999], [1, 17]):
        q[:2] = torch.randn_like(q[:2])
        out.fill_(torch.nan)
        load(lens)
        graph.replay()
        now = batch._replace(q=q[:2], kv_lens=torch.tensor(lens, dtype=torch.int32, device="cuda"))
        assert_as_good(out[:2], now, scale=0.1)
        assert out[2:].isnan().all()
