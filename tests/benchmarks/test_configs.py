"""The configs of benchmarks/configs are those of the models they are named after, down to the parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ramify.runtime.model.loading.load import FAMILIES, dummy_model
from ramify.runtime.model.shape.hf_config import config_from_hf

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "benchmarks" / "configs"
PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-0.6b": 596_049_920,
    "qwen3-14b": 14_768_307_200,
    "smollm2-135m": 134_515_008,
}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_parameters_are_as_many_as_published(path: Path):
    config = config_from_hf(json.loads(path.read_text()))
    with torch.device("meta"):
        model = FAMILIES[config.family](config, torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[path.stem]


def test_every_config_is_there():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(PARAMETERS)


def test_dummy_weights_fill_the_smallest():
    config = config_from_hf(json.loads((FOLDER / "smollm2-135m.json").read_text()))
    model = dummy_model(config, dtype=torch.bfloat16)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert model.config.head_dim == 64
