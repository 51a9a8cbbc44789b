"""`ramify calibrate` on real weights, and a server that uses the temperatures."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from ramify.cli import main
from ramify.decisions.answers import tempered
from ramify.decisions.calibration import read_calibration
from tests.end_to_end.served import Served, serve

pytestmark = [pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(300)]

VALUES = ("billing", "returns", "storage")
QUESTION: dict[str, Any] = {
    "type": "choice",
    "instructions": "Which team handles it?",
    "choices": [{"value": value} for value in VALUES],
}
THINGS = ("lamp", "parcel", "invoice", "server", "refund", "disk")


def labelled(folder: Path, served: Served) -> str:
    """Forty questions. Three of four labels are the answers of the server, and the fourth is drawn at random:
    no answer deserves its certainty."""
    rng = random.Random(1)
    rows = []
    for number in range(40):
        text = f"Case {number}: the {rng.choice(THINGS)} of customer {rng.randrange(1000)} is broken."
        right = answer_of(served, text)["choice"]
        label = rng.choice(VALUES) if number % 4 == 0 else right
        rows.append({"input": text, "question": QUESTION, "label": label})
    path = folder / "labelled.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def answer_of(served: Served, text: str) -> Any:
    body = {"model": "default", "input": text, "questions": [QUESTION]}
    answer = httpx.post(served.url + "/v1/decisions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["answers"][0]


def probabilities(served: Served, applied: float) -> list[float]:
    answer = answer_of(served, "The lamp is broken.")
    assert answer["temperature"] == applied
    return [each["probability"] for each in answer["probabilities"]]


def test_a_server_uses_the_temperatures_that_were_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "calibration.json")
    with serve("--deterministic") as served:
        command = ["calibrate", labelled(tmp_path, served), "--endpoint", served.url, "--output", out]
        assert main.main(command) == 0
        before = probabilities(served, 1.0)
    temperature = read_calibration(out).temperatures["choice"].base
    assert temperature > 1.2
    assert f"{temperature:.2f}" in capsys.readouterr().out
    with serve("--deterministic", "--calibration", out) as served:
        after = probabilities(served, temperature)
    assert after == pytest.approx(tempered(before, temperature), rel=1e-9)
    assert max(after) < max(before)
    command = [sys.executable, "-m", "ramify", "serve", "--port", "0", "--calibration", out]
    command += ["--quantization", "int8"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2
    assert "was fitted to the model" in refused.stderr
