"""`ramify calibrate`: labelled questions asked of a server, the figures, and the file of temperatures."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.cli import main
from ramify.cli.calibrate import ANY_CHAT, DESCRIPTION, LOW_MASS
from ramify.cli.inputs import labelled_file
from ramify.decisions.answers import tempered
from ramify.decisions.calibration import read_calibration
from ramify.errors import InvalidRequest
from ramify.questions import Calibration, Decide, Option, Question, Temperature
from tests.server.byte_model import decided
from tests.server.fake_frontend import LiveServer

TRUE_TEMPERATURE = 3.0
"""The byte model's probabilities to the power of 1 / this are those that the labels are drawn from."""
VALUES = ("billing", "returns", "sales")
ASKED = [f"Which team, {number}?" for number in range(4)]


def choice(instructions: str) -> dict[str, Any]:
    return {"type": "choice", "instructions": instructions, "choices": [{"value": value} for value in VALUES]}


def lines(states: int = 50, temperature: float = TRUE_TEMPERATURE, seed: int = 0) -> list[dict[str, Any]]:
    """Questions whose labels are drawn from the byte model's probabilities, softened."""
    rng, found = random.Random(seed), []
    for state in range(states):
        for instructions in ASKED:
            options = tuple([Option(name=value) for value in VALUES])
            question = Question(kind="choice", instructions=instructions, options=options)
            prompt = f"<user>case {state}".encode()
            (scores,) = decided(prompt, Decide(questions=(question,))).questions
            stated = [math.exp(log) for log in scores.forms[0].logprobs]
            label = rng.choices(VALUES, tempered(stated, temperature))[0]
            found.append({"input": f"case {state}", "question": choice(instructions), "label": label})
    rng.shuffle(found)
    return found


def write(folder: Path, *rows: Any) -> str:
    path = folder / "labelled.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def calibrate(server: LiveServer, file: str, *flags: str) -> int:
    return main.main(["calibrate", file, "--endpoint", server.url, *flags])


def figures(out: str, name: str) -> dict[str, float]:
    """The figures of a row of the report."""
    row = next(line for line in out.splitlines() if line.split()[:1] == [name])
    cells = row.replace("->", "").replace("%", "").split()[1:]
    pairs = [name + when for name in ("nll", "brier", "ece", "certain") for when in ("", " after")]
    return dict(zip(["items", "accuracy", "mass", *pairs, "temperature"], map(float, cells), strict=False))


def test_temperatures_are_fitted_and_written(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "calibration.json"
    assert calibrate(server, write(tmp_path, *lines()), "--output", str(out)) == 0
    printed = capsys.readouterr().out
    found = read_calibration(str(out))
    assert found.layout == "verbatim-1"
    assert found.model == server.frontend.info.digest
    assert found.temperatures["choice"].base == pytest.approx(TRUE_TEMPERATURE, rel=0.3)
    row = figures(printed, "choice")
    assert row["items"] == 200
    assert row["nll after"] < row["nll"] - 0.1
    assert row["ece after"] < row["ece"] / 2
    assert row["temperature"] == pytest.approx(found.temperatures["choice"].base, abs=0.01)
    assert printed.startswith(
        "verbatim-1, end prefix, normalise sum, permutations 1: 200 questions about 50 states"
    )


def test_questions_about_one_state_are_one_request(server: LiveServer, tmp_path: Path) -> None:
    calibrate(server, write(tmp_path, *lines(8)))
    requests = server.frontend.requests
    assert len(requests) == 8
    asked = [one.instructions for one in requests[0].decide.questions]  # type: ignore[union-attr]
    assert sorted(asked) == ASKED
    assert len({request.flow for request in requests}) == 1


def test_before_is_by_the_calibration_of_the_target(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, *lines())
    calibrate(server, file)
    plain = figures(capsys.readouterr().out, "all")
    own = Calibration(
        model="m", layout="verbatim-1", temperatures={"choice": Temperature(base=TRUE_TEMPERATURE)}
    )
    server.frontend.info = msgspec.structs.replace(server.frontend.info, calibration=own)
    calibrate(server, file)
    found = figures(capsys.readouterr().out, "all")
    assert found["nll"] < plain["nll"] - 0.1
    assert found["nll after"] == plain["nll after"], "a fit is to the probabilities without calibration"
    calibrate(server, file, "--end", "turn")
    assert figures(capsys.readouterr().out, "all")["nll"] == plain["nll"], "it was fitted to another end"


def test_combinations_are_compared(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = ["--layout", "verbatim", "--layout", "labels", "--normalise", "sum", "--normalise", "pmi"]
    assert calibrate(server, write(tmp_path, *lines(4)), *ways) == 0
    printed = capsys.readouterr().out.splitlines()
    heads = [line.split(":")[0] for line in printed if " questions about " in line]
    assert heads == [
        f"{layout}-1, end prefix, normalise {normalise}, permutations 1"
        for layout in ("verbatim", "labels")
        for normalise in ("sum", "pmi")
    ]
    losses = [figures(line, "all")["nll after"] for line in printed if line.startswith("all ")]
    best = min(range(4), key=losses.__getitem__)
    assert printed[-1] == f"Lowest NLL after: {losses[best]:.3f}, with {heads[best]}."
    requests = server.frontend.requests
    assert len(requests) == 2 * (4 + 1), "normalising needs no second run"
    empty = [request for request in requests if request.chat[0].content == ""]  # type: ignore[index]
    assert [len(request.decide.questions) for request in empty] == [16, 16]  # type: ignore[union-attr]
    assert calibrate(server, write(tmp_path, *lines(4)), *ways, "--output", str(tmp_path / "c.json")) == 2
    assert "--output needs one layout" in capsys.readouterr().err


def test_all_wrong_lines_are_named_before_anything_is_asked(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    level = {"type": "score", "instructions": "How?", "levels": [{"label": "low"}, {"label": "high"}]}
    true = {"type": "predicate", "instructions": "Is it?"}
    flag = {"type": "choice", "instructions": "?", "choices": [{"value": True}, {"value": "true"}]}
    file = write(
        tmp_path,
        {"input": "a", "question": choice("?"), "label": "billing"},
        {"input": "a", "question": choice("?"), "label": "complaints"},
        "",
        '{"input": "a",',
        {"input": "a", "question": true, "label": 1},
        {"input": "a", "question": true},
        {"input": "a", "question": level, "label": 2},
        {"input": "a", "question": level | {"type": "rank"}, "label": 0},
        {"input": "a", "question": level, "label": "high", "weight": 2},
        {"input": "a", "question": level, "label": "high"},
        {"input": "a", "question": flag, "label": True},
    )
    assert calibrate(server, file) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "ramify: 7 lines are wrong:"
    assert [line.split(":")[0].strip() for line in said[1:]] == [
        f"line {number}" for number in (2, 4, 5, 6, 7, 8, 9)
    ]
    assert "label is 'complaints'; the choice has 'billing', 'returns', 'sales'." in said[1]
    assert "line 4: It must be one JSON object: " in said[2]
    assert "label is 1; the predicate has True, False." in said[3]
    assert "label is 2; the score has 0, 1." in said[5]
    assert not server.frontend.requests


def test_a_line_that_the_engine_refuses_is_named(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = sorted(lines(1), key=lambda row: row["question"]["instructions"])
    field = "decide.questions[2].options[1].name"
    server.frontend.fail_first = InvalidRequest("Two options have the same tokens.", field=field)
    assert calibrate(server, write(tmp_path, "", *rows)) == 2
    said = capsys.readouterr().err
    assert said == "ramify: 1 line is wrong:\n  line 4: Two options have the same tokens.\n"


def test_what_is_wrong_with_the_way_to_ask_names_no_line(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.frontend.fail_first = InvalidRequest("permutations is 0.", field="decide.permutations")
    assert calibrate(server, write(tmp_path, *lines(1)), "--permutations", "0") == 2
    assert capsys.readouterr().err == "ramify: permutations is 0.\n"


def test_a_fit_that_is_refused_is_not_written(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "calibration.json"
    assert calibrate(server, write(tmp_path, *lines(4)), "--output", str(out)) == 1
    printed = capsys.readouterr().out
    assert "no temperature for choice: 16 questions are fewer than 30" in printed
    assert not out.exists()


def test_a_fit_that_does_not_lower_the_printed_loss_is_not_written(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nine sets of few labels, which need a temperature of 1.7: some are too few to show it."""
    out = tmp_path / "calibration.json"
    written = 0
    for seed in range(9):
        code = calibrate(server, write(tmp_path, *lines(12, 1.7, seed)), "--output", str(out))
        printed = capsys.readouterr().out
        row = figures(printed, "choice")
        assert code == (0 if row["nll after"] < row["nll"] else 1)
        assert out.exists() == ("temperature" in row) == (code == 0)
        assert ("no temperature for choice: " in printed) == (code == 1)
        assert ("is not written" in printed) == (code == 1)
        assert "temperatures of" not in printed or "verbatim-1 for choice." in printed
        written += code == 0
        out.unlink(missing_ok=True)
    assert 0 < written < 9


def test_answers_at_chance_and_a_small_option_mass_are_told(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = lines(20)
    calibrate(server, write(tmp_path, *rows))
    assert "chance" not in capsys.readouterr().out
    for row, label in zip(rows, random.Random(1).choices(VALUES, k=len(rows)), strict=True):
        row["label"] = label
    calibrate(server, write(tmp_path, *rows))
    printed = capsys.readouterr().out
    assert "Lowest" not in printed, "there is one way"
    assert "warning: choice: an accuracy of " in printed
    assert "is not clearly above chance, 33.3%" in printed
    # The byte model's options have a mass of up to 0.15, the questions' choice is all that it answers.
    mass = figures(printed, "choice")["mass"]
    assert (f"warning: choice: a mean option mass of {mass:.3f} is small" in printed) == (mass < LOW_MASS)
    assert mass < LOW_MASS


@pytest.mark.parametrize(
    "text",
    [DESCRIPTION, labelled_file.__doc__, (Path(__file__).parents[2] / "docs" / "decide.md").read_text()],
)
def test_examples_can_be_copied(text: str) -> None:
    examples = [line for line in text.splitlines() if line.strip().startswith('{"input"')]
    (found,) = labelled_file.labelled_questions("\n".join(examples).encode(), ANY_CHAT)
    assert (found.question.kind, found.label) == ("predicate", 0)


def test_a_folder_that_is_missing_is_named_before_anything_is_asked(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(server, write(tmp_path, *lines(4)), "--output", str(tmp_path / "none" / "c.json")) == 2
    assert "There is no folder" in capsys.readouterr().err
    assert not server.frontend.requests


def test_a_line_that_is_no_object_is_told_so(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(server, write(tmp_path, '{"input": "x",', '"label": true}')) == 2
    said = capsys.readouterr().err
    assert "line 1: It must be one JSON object: " in said
    assert "body" not in said


def test_a_temperature_at_the_upper_bound_is_refused(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = []
    for row in lines():
        options = tuple([Option(name=value) for value in VALUES])
        question = Question(kind="choice", instructions=row["question"]["instructions"], options=options)
        prompt = f"<user>{row['input']}".encode()
        (scores,) = decided(prompt, Decide(questions=(question,))).questions
        least = min(range(len(VALUES)), key=scores.forms[0].logprobs.__getitem__)
        rows.append(row | {"label": VALUES[least]})
    assert calibrate(server, write(tmp_path, *rows)) == 0
    out = capsys.readouterr().out
    assert (
        "no temperature for choice: 16.00 is the bound: the probabilities say nothing about the labels" in out
    )
