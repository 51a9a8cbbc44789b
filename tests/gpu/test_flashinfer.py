"""FlashInfer itself on a GPU, where it is installed: outputs of `FlashInferPlanner` against torch."""

from __future__ import annotations

import pytest
import torch

from ramify.kernels.flashinfer import FlashInferPlanner
from tests.kernels.attention_cases import Batch, make_batch
from tests.kernels.cascade_cases import assert_as_good

pytest.importorskip("flashinfer", reason="needs ramify-llm[flashinfer]", exc_type=ImportError)

DECODES = [(1, 1), (1, 300), (1, 64), (1, 5000)]
MIXED = [(1, 1), (1, 300), (50, 50), (37, 1290), (3, 130), (1, 64), (300, 700), (1, 5000)]


@pytest.mark.parametrize("lengths", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (9, 3), (32, 8), (7, 1)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (128, 0.0), (0, 30.0)])
def test_as_the_reference(lengths, heads, kv_heads, head_dim, window, soft_cap):
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": 64}
    host = make_batch(lengths, dtype=torch.bfloat16, **shape)
    batch = Batch(*(tensor.cuda() for tensor in host))
    options = {"scale": head_dim**-0.5, "window": window, "soft_cap": soft_cap}
    planner = FlashInferPlanner(dtype=torch.bfloat16, device=batch.q.device, **shape, **options)
    lists = [each.numpy() for each in (host.page_table, host.query_starts, host.kv_lens)]
    for _ in range(2):  # the second plan waits for the first one's copy
        planner.plan(*lists)
        out = planner.run(batch.q, batch.k_pages, batch.v_pages)
    assert_as_good(out, batch, **options)
