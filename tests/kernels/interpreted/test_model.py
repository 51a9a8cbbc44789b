"""Whole requests on the Triton backend, in the interpreter: tokens equal those of the torch backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ramify.kernels.registry import ops
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.load import loader
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.loading.load import read_config
from tests.runtime.local import LocalScheduler, Result
from tests.runtime.tiny import write_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


def answers(folder: Path, backend: str) -> list[Result]:
    """Answers with prefill in chunks, cached prefixes, copy-on-write of a shared page, and mixed lengths."""
    torch.manual_seed(0)
    base = torch.randint(256, (45,)).tolist()
    local = LocalScheduler(folder, attention_backend=backend, page_size=8, chunk_tokens=32, num_pages=64)
    first = local.complete([base, base[:3], [*base[:20], 7, 8]], max_tokens=5, ignore_eos=True, logprobs=2)
    again = local.complete([[*base[:21], 1, 2, 3], base], max_tokens=5, ignore_eos=True, logprobs=2)
    return first + again


def test_greedy_tokens_equal_those_of_the_torch_backend(folder, launches):
    expected, found = answers(folder, "torch"), answers(folder, "triton")
    assert [result.ids for result in found] == [result.ids for result in expected]
    assert len({token for result in found for token in result.ids}) > 3, "the model says too little"
    for mine, theirs in zip(found, expected, strict=True):
        for (_, value, _), (_, other, _) in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert value == pytest.approx(other, abs=1e-4)
    assert {"attend", "_rope_store", "_rms_norm", "_copy"} <= {launch.kernel for launch in launches}


def test_weights_of_four_bits_stay_so(folder, launches):
    """The tokens are those of the same rounded weights in the torch backend, for layers and head."""
    files, shape = ModelFiles("tiny", folder, folder), read_config(folder)
    load = loader(EngineConfig(quantization="int4"), files, shape, 128)

    def said(backend: str) -> list[Result]:
        model = load(torch.float32, torch.device("cpu"), ops(backend))
        local = LocalScheduler(model, attention_backend=backend, page_size=8, num_pages=8)
        return local.complete([list(range(9)), [7, 8]], max_tokens=3, ignore_eos=True)

    expected, found = said("torch"), said("triton")
    assert [result.ids for result in found] == [result.ids for result in expected]
    assert {form["FORM"] for form in launches.forms("_quantised_product")} == {"int4"}


def test_the_backend_has_everything():
    triton, torchs = ops("triton"), ops("torch")
    of_the_cpu = {
        "linear",
        "masked_linear",
        "prefers_packed",
        "flat_attention",
        "layer_linear",
        "layer_stack",
        "expert_block",
        "sample_tokens",
    }
    of_the_gpu = {"planner", "matmul", "quantised_matmul", "mixture", "deterministic"}
    for name in triton.__slots__:
        if name not in of_the_cpu | of_the_gpu | {"flashinfer"}:
            assert getattr(triton, name) is not None, name
            assert getattr(torchs, name) is not None, name
