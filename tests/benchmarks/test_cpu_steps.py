"""`benchmarks.cpu_steps` in small."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from benchmarks import cpu_steps
from benchmarks.step_parts import PARTS
from ramify.kernels.cpu import attention, linear
from ramify.kernels.machine.threads import team_entry
from tests.model.checkpoints import Case, build
from tests.model.gguf_files import write_gguf

pytestmark = pytest.mark.slow

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(build(Case("llama", "llama", SHAPE)), path, "llama", matrices=GGMLQuantizationType.Q8_0)
    return path


def test_each_number_of_rows_has_a_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompt", "16", "--context", "8", "--steps", "2", "--repeat", "1"]
    cpu_steps.main([str(file), "--rows", "1", "3", *sizes])
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[2:]] == ["1", "3"]
    assert all(line.endswith(("reading", "computing")) for line in out[2:])


def test_the_parts_of_a_step_add_up(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompt", "16", "--context", "8", "--steps", "2", "--repeat", "1", "--masked", "0.5"]
    cpu_steps.main([str(file), "--rows", "1", "4", "--parts", *sizes])
    heads, *lines = capsys.readouterr().out.splitlines()[1:]
    assert heads.split()[2:] == [*PARTS, "waiting"]
    assert [line.split()[0] for line in lines] == ["1", "4"]
    for line in lines:
        shares = dict(
            zip(PARTS, (float(each.rstrip("%")) for each in line.split()[2:]), strict=False),
        )
        assert sum(shares.values()) == pytest.approx(100, abs=0.5)
        assert all(shares[part] > 0 for part in ("products", "attention", "norms", "rotation", "Python"))


def test_timers_are_off_afterwards(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompt", "16", "--context", "8", "--steps", "1", "--repeat", "1"]
    cpu_steps.main([str(file), "--rows", "1", "--parts", *sizes])
    assert linear.arena.call.times == 0
    assert linear.arena.call.team == attention.arena.call.team == team_entry()
