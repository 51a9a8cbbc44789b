"""`benchmarks.engine` in small, on the CPU, and its rooflines against figures made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import engine
from benchmarks.engine_local import LocalEngine
from benchmarks.roofline import kv_bytes, prefill_flop, weight_bytes
from ramify.kernels.registry import ops
from ramify.runtime.config import EngineConfig
from ramify.runtime.model.hf_config import config_from_hf
from ramify.runtime.model.load import FAMILIES, dummy_model

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
TINY = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}


def test_a_run_prints_every_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape, out = tmp_path / "tiny.json", tmp_path / "out.json"
    shape.write_text(json.dumps(TINY))
    arguments = ["--shape", str(shape), "--device", "cpu", "--json", str(out), "--deterministic"]
    sizes = "--batches 1 3 --context 64 --steps 4 --prompt 100 --chunk 32 --branches 4 --prefixes 64 128"
    assert engine.main([*arguments, *sizes.split()]) == 0
    found = json.loads(out.read_text())
    assert found["bandwidth"] > 0
    assert found["flops"] > 0
    rows = {row["case"]: row for row in found["rows"]}
    cases = ["decode 1 x 64", "decode 3 x 64", "prefill 100"]
    assert list(rows)[:3] == cases
    for case in cases:
        assert rows[case]["tokens_s"] > 0
        assert rows[case]["of_roofline"] > 0
        assert rows[f"deterministic {case}"]["ratio"] > 0
    for case in cases[:2]:
        row = rows[case]
        assert 0 <= row["host_s"] <= row["seconds"]
        assert row["host_s"] == pytest.approx(max(0.0, row["seconds"] - row["device_s"]))
    printed = capsys.readouterr().out
    assert all(case in printed for case in rows)


def test_steps_may_end_at_the_border_of_a_page(tmp_path: Path) -> None:
    shape = tmp_path / "tiny.json"
    shape.write_text(json.dumps(TINY))
    config = EngineConfig(device="cpu", dtype="float32", page_size=16, num_pages=64, speculation=False)
    local = LocalEngine(shape, config)
    prompts = [local.prompt(20), local.prompt(64)]
    for prompt in prompts:
        local.know(prompt)
    for steps in range(1, 17):  # one of them ends at a border
        step = local.decode(prompts, steps)
        assert step.device > 0


def test_the_bytes_of_a_decode() -> None:
    """8 billion parameters less the embedding, two bytes each; 128 KiB of KV a token."""
    config = config_from_hf(json.loads((CONFIGS / "llama-3.1-8b.json").read_text()))
    with torch.device("meta"):
        model = FAMILIES[config.family](config, torch.bfloat16)
    assert weight_bytes(model) == 2 * (8_030_261_248 - 128256 * 4096)
    assert kv_bytes(config, 1, torch.bfloat16) == 128 << 10


def test_packed_weights_are_counted_as_they_lie() -> None:
    config = config_from_hf(TINY)
    plain = dummy_model(config, dtype=torch.bfloat16)
    packed = dummy_model(config, dtype=torch.bfloat16, packed=ops("cpu").prefers_packed)
    assert weight_bytes(packed) == weight_bytes(plain), "all sizes are multiples of the panels'"


def test_the_operations_of_a_prefill() -> None:
    """Two for each weight of the layers and each token, and four for each number of each pair."""
    config = config_from_hf(TINY)
    layer = 64 * (128 + 2 * 64) + 128 * 64 + 3 * 64 * 128
    assert prefill_flop(config, 10) == 2 * (2 * layer * 10 + 4 * 128 * 55)
