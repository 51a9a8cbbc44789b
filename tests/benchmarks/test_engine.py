"""`benchmarks.engine` in small, on the CPU, and its rooflines against figures made by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import engine
from benchmarks.engine_local import MOST_WARM, QUIET_STEPS, LocalEngine, fill
from benchmarks.roofline import dense, kv_bytes, weight_bytes
from ramify.kernels.registry import ops
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.graph_buffers import Captures
from ramify.runtime.executor.runner import Runner
from ramify.runtime.model.loading.load import FAMILIES, dummy_model
from ramify.runtime.model.shape.hf_config import config_from_hf
from ramify.runtime.scheduler.scheduler import Scheduler

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
    assert engine.parse(sizes.split())[1] == engine.TINY
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
        assert len(rows[case]["rounds"]) > 1
        assert rows[case]["spread"] >= 0
        assert rows[case]["warm"] >= 1
        assert rows[case]["unsettled"] == 0
        assert rows[f"deterministic {case}"]["ratio"] > 0
    for case in cases[:2]:
        row = rows[case]
        assert 0 <= row["host_s"] <= row["seconds"]
        assert row["host_s"] == pytest.approx(max(0.0, row["seconds"] - row["device_s"]))
    printed = capsys.readouterr().out
    assert all(case in printed for case in rows)
    assert printed.count("kernels compiled in") == len(found["states"]) == 4
    assert found["states"]["measured"]["memory"]["pages"] > 0


def local_engine(folder: Path) -> LocalEngine:
    shape = folder / "tiny.json"
    shape.write_text(json.dumps(TINY))
    return LocalEngine(shape, EngineConfig(device="cpu", dtype="float32", page_size=16, num_pages=64))


def test_steps_are_timed_once_no_form_waits_for_its_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A form that is captured at its 12th step; later one that never is."""
    captured, step, seen = Captures(), Scheduler.step, []

    def counted(scheduler: Scheduler) -> object:
        seen.append(0)
        captured.awaited += len(seen) < 12
        captured.graphs += len(seen) == 12 or (len(seen) > 300)
        return step(scheduler)

    monkeypatch.setattr(Runner, "captured", captured)
    monkeypatch.setattr(Scheduler, "step", counted)
    local = local_engine(tmp_path)
    prompt = local.prompt(30)
    for _ in range(2):
        local.know(prompt)
        rounds = local.decode([prompt], 3, rounds=2).rounds
        assert (rounds.warm, rounds.unsettled) == (12 + QUIET_STEPS, 0)
        assert len(rounds.seconds) == 2
        seen.clear()
    seen.extend([0] * 300)
    local.know(prompt)
    rounds = local.decode([prompt], 3, rounds=2).rounds
    assert (rounds.warm, rounds.unsettled) == (MOST_WARM[0], 6)
    rounds = local.prefills(40, rounds=2)
    assert (rounds.warm, rounds.unsettled) == (MOST_WARM[1], 2)


def test_what_fails_leaves_no_request_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode too long for the engine, and steps that break in a decode, in its warm-up and in a prefill."""
    local = local_engine(tmp_path)
    prompts = [local.prompt(30), local.prompt(40)]

    def decode(steps: int = 3) -> float:
        for prompt in prompts:
            local.know(prompt)
        return local.decode(prompts, steps, rounds=1).device

    with pytest.raises(RuntimeError, match="not all requests decode"):
        decode(steps=10**6)
    assert decode() > 0
    for call, after in ((decode, 2), (decode, QUIET_STEPS + 2), (lambda: local.prefill(100), 0)):
        step, left = Scheduler.step, [after]

        def breaks(scheduler: Scheduler, step: Any = step, left: list[int] = left) -> object:
            left[0] -= 1
            if left[0] == -1:
                raise ArithmeticError("a step that breaks")
            return step(scheduler)

        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "step", breaks)
            with pytest.raises(ArithmeticError):
                call()
        assert decode() > 0
        assert local.prefill(100) > 0


def test_neither_pages_nor_weights_are_zeros(tmp_path: Path) -> None:
    local = local_engine(tmp_path)
    for pages in (local.runner.pool.k, local.runner.pool.v, torch.zeros(5_000_000).to(torch.float8_e4m3fn)):
        fill(pages)
        for part in pages.flatten().split(1000):
            assert 0.8 < part.float().std() < 1.2
    assert not torch.equal(local.runner.pool.k[0], local.runner.pool.k[1])
    matrices = [parameter for parameter in local.model.parameters() if parameter.ndim > 1]
    assert matrices
    assert all(0.015 < parameter.float().std() < 0.025 for parameter in matrices)


def test_roofs_are_for_dense_models() -> None:
    for name, counted in (("llama-3.1-8b", True), ("qwen3-14b", True)):
        assert dense(config_from_hf(json.loads((CONFIGS / f"{name}.json").read_text()))) == counted
    config = config_from_hf(TINY)
    assert not dense(dataclasses.replace(config, windows=(0, 128)))


def test_steps_may_end_at_the_border_of_a_page(tmp_path: Path) -> None:
    local = local_engine(tmp_path)
    prompts = [local.prompt(20), local.prompt(64)]
    for steps in range(1, 17):  # one of them ends at a border
        for prompt in prompts:
            local.know(prompt)
        step = local.decode(prompts, steps, rounds=1)
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
