"""A decider checkpoint, with random weights, behind `/v1/systemone`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.decisions.decider_cases import CONFIGS, IDS, QUESTIONS, STATES, tokenizer
from tests.end_to_end.served import serve
from tests.runtime.tiny import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG = CONFIGS["isolated"] | {
    "temperature": 1.5,
    "temperature_by_type": {"noul": 2.5, "score": 0.5},
}
TEMPERATURES = {"choice": 1.5, "noul": 2.5, "score": 0.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "decider"
    folder.mkdir()
    model = tokenizer()
    model.save_pretrained(folder)
    write_model(folder, context_length=4096, vocab_size=len(model))
    (folder / "decider_config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[httpx.Client]:
    with (
        serve("--model", str(folder), "--dtype", "float32", "--device", "cpu") as served,
        httpx.Client(base_url=served.url, timeout=60, verify=False) as client,
    ):
        yield client


def expected(folder: Path, at: int) -> list[list[float]]:
    """Probabilities of each question about a state, by transformers over the token ids of decider-ai."""
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    labels = tokenizer()
    names = [*map(chr, range(65, 91)), *(chr(a) + chr(b) for a in range(65, 91) for b in range(65, 91))]
    tokens = torch.tensor([labels.convert_tokens_to_ids(name) for name in names[:255]])
    ids = json.loads(IDS.read_text())["isolated"]
    found = []
    for question, forms in zip(QUESTIONS.values(), ids["forms"], strict=True):
        kind = question["type"]
        rows = []
        for form in forms:
            logits = oracle(torch.tensor([ids["states"][at] + form])).logits[0, -1]
            n = len(question["criteria"]) if kind == "choice" else 2
            rows.append(torch.softmax(logits[tokens[:n]].double() / TEMPERATURES[kind], 0))
        if kind == "score":
            yes = torch.stack([row[1] for row in rows])
            rows = [yes / yes.sum()]
        found.append(rows[0].tolist())
    return found


@pytest.mark.parametrize("at", range(len(STATES)))
def test_probabilities_of_the_package(folder: Path, http: httpx.Client, at: int) -> None:
    body: Any = {"model": "jev-latest", "state": STATES[at], "questions": QUESTIONS}
    response = http.post("/v1/systemone", json=body)
    assert response.status_code == 200, response.text
    answers = response.json()["answers"]
    for name, probabilities in zip(QUESTIONS, expected(folder, at), strict=True):
        answer = answers[name]
        assert answer["layout"] == "decider-1"
        given = [answer["noul"]] if "noul" in answer else list(answer["probabilities"].values())
        wanted = probabilities[1:] if "noul" in answer else probabilities
        assert given == pytest.approx(wanted, rel=1e-4, abs=1e-7)


def test_named_layouts(http: httpx.Client) -> None:
    questions = {"q": QUESTIONS["pair"]}
    for layout, name in (("trained", "decider-1"), ("verbatim", "verbatim-1")):
        body = {"model": "jev-latest", "state": "x", "questions": questions, "layout": layout}
        assert http.post("/v1/systemone", json=body).json()["answers"]["q"]["layout"] == name
    body = {"model": "jev-latest", "state": "x", "questions": questions, "end": "turn"}
    response = http.post("/v1/systemone", json=body)
    assert (response.status_code, response.json()["detail"][0]["loc"]) == (422, ["body", "end"])
