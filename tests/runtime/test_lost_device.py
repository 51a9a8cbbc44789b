"""A lost CUDA device ends the process: only a new process gets the device back."""

from __future__ import annotations

import pytest
import torch

from ramify.runtime.executor.runner import Runner
from ramify.runtime.model.loading.load import dummy_model
from ramify.runtime.model.shape.hf_config import config_from_hf
from tests.kernels.test_triton_warm_up import SHAPE
from tests.runtime.local import LocalScheduler


def failing(monkeypatch: pytest.MonkeyPatch) -> LocalScheduler:
    local = LocalScheduler(dummy_model(config_from_hf(SHAPE), dtype=torch.float32), attention_backend="torch")

    def fails(self: Runner, batch: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Runner, "forward", fails)
    return local


def test_an_error_that_the_device_repeats_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    local = failing(monkeypatch)
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")

    def synchronize(device: torch.device) -> None:
        raise lost

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(local.runner, "device", torch.device("cuda"))
    with pytest.raises(RuntimeError) as raised:
        local.complete([[1, 2, 3]])
    assert raised.value is lost
