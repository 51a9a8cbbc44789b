"""Models on the Triton kernels, interpreted: the twins' results, and every launch of a decoding step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from ramify.kernels.registry import Ops, ops
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.kv_pool import KvPool
from ramify.runtime.executor.runner import Runner
from ramify.runtime.model.layers import RMSNorm
from ramify.runtime.model.loading.load import FAMILIES
from ramify.runtime.model.shape.hf_config import config_from_hf

LAYERS, PAGE = 2, 4
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
VIEWS = {"view", "view_as_real", "slice", "select", "split", "split_with_sizes", "flatten", "unflatten"}
NOT_LAUNCHED = VIEWS | {"empty", "empty_like", "detach", "resolve_conj", "resolve_neg"}
"""Counts the launches of torch's operations."""
IDS = torch.randint(0, 96, (2, 20), generator=torch.Generator().manual_seed(1)).int().numpy()
STEPS = [
    [Extension(IDS[0], 0, 13, range(5)), Extension(IDS[1], 0, 6, range(5, 10))],
    [Extension(IDS[0], 13, 14, range(5)), Extension(IDS[1], 6, 7, range(5, 10))],
]


def runner_of(shape: dict[str, Any], kernels: Ops) -> Runner:
    config = config_from_hf(SHAPE | shape)
    model = FAMILIES[config.family](config, torch.float32).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.2)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight.uniform_(0.5, 2.0)
    pool = KvPool(config, num_pages=10, page_size=PAGE, dtype=torch.float32)
    pool.k.fill_(torch.nan), pool.v.fill_(torch.nan)
    return Runner(model, pool, kernels)


class Launches(TorchDispatchMode):
    """Counts the launches on a device: our kernels, and torch's operations outside them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._inside = False
        run = GridExecutor.__call__

        def counted(executor: Any, *args: Any, **options: Any) -> None:
            self.counts[executor.fn.__name__] += 1
            self._inside = True
            run(executor, *args, **options)
            self._inside = False

        monkeypatch.setattr(GridExecutor, "__call__", counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self._inside and name not in NOT_LAUNCHED:
            self.counts[name] += 1
        return func(*args, **kwargs or {})


GEMMA2 = {"model_type": "gemma2", "sliding_window": 5, "hidden_activation": "gelu_pytorch_tanh"}
GEMMA2 |= {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0}


@pytest.mark.parametrize(
    ("shape", "deterministic", "more"),
    [
        ({"model_type": "llama"}, False, {}),
        ({"model_type": "qwen3"}, True, {}),
        # Two norms more, which follow the sublayers; and the scale of the embedding.
        (GEMMA2, True, {"_rms_norm": 2 * LAYERS, "mul": 1}),
    ],
    ids=["llama", "qwen3 deterministic", "gemma2 deterministic"],
)
def test_nine_launches_a_layer(
    shape: dict[str, Any], deterministic: bool, more: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = runner_of(shape, ops("torch"))
    found = runner_of(shape, ops("triton", deterministic=deterministic))
    launches, compute = Launches(monkeypatch), found._compute

    def counted(*args: Any) -> torch.Tensor:
        with launches:
            return compute(*args)

    monkeypatch.setattr(found, "_compute", counted)
    for step in STEPS:
        launches.counts.clear()
        hidden, wanted = (runner.forward(pack(step, PAGE)) for runner in (found, expected))
        torch.testing.assert_close(hidden, wanted, atol=1e-4, rtol=0)
    assert launches.counts == Counter(more) + Counter(
        {
            "embedding": 1,
            "index": 1,  # the rotations of the positions
            "_rms_norm": 1,  # the first; the last is that of a sum
            "_add_rms_norm": 2 * LAYERS,
            "_product" if deterministic else "linear": 4 * LAYERS,
            "_rope_store": LAYERS,
            "attend": LAYERS,
            "_gated_mul": LAYERS,
        }
    )
