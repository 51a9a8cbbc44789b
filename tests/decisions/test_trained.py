"""Checkpoints that were trained to answer questions: recognition, and the token ids of their package."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from ramify.decisions.answers import answer, temperature
from ramify.decisions.decider import PLAIN, DeciderConfig, decider_config, decider_layout, state_text
from ramify.decisions.layouts import Form
from ramify.decisions.logit_score import LogitScoreConfig, logit_score_layout
from ramify.decisions.trained import Other, trained
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import ChatMessage, Generate, Segment
from ramify.questions import FormScores, Option, Question, QuestionScores
from tests.decisions.decider_cases import CONFIGS, IDS, QUESTIONS, STATES, tokenizer

EXPECTED: dict[str, Any] = json.loads(IDS.read_text())
AROUND = ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.fixture(scope="module")
def model() -> PreTrainedTokenizerFast:
    return tokenizer()


def ids_of(model: PreTrainedTokenizerFast, segments: Sequence[Segment]) -> list[int]:
    """Neighbouring texts are tokenised together, as `Form.body` says."""
    ids: list[int] = []
    text = ""
    for segment in (*segments, ()):
        if isinstance(segment, str):
            text += segment
            continue
        ids += [*model.encode(text, add_special_tokens=False), *segment]
        text = ""
    return ids


def question(given: dict[str, Any]) -> Question:
    """A question of System One in our form."""
    criteria = given.get("criteria")
    described: list[tuple[str, str | None]]
    match given["type"]:
        case "noul":
            described = [(name, (criteria or {}).get(name)) for name in ("true", "false")]
        case "choice":
            described = list(criteria.items())
        case _:
            described = [(str(level), text) for level, text in enumerate(criteria)]
    return Question(
        kind={"noul": "predicate"}.get(given["type"], given["type"]),
        instructions=given.get("instructions", ""),
        options=tuple(Option(name=name, description=text or "") for name, text in described),
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_ids_of_deciders_equal_those_of_their_package(model: PreTrainedTokenizerFast, name: str) -> None:
    def encode(text: str) -> list[int]:
        return model.encode(text, add_special_tokens=False)

    config = decider_config(CONFIGS[name])
    layout = decider_layout(config, encode, AROUND if config.chat else PLAIN)
    assert layout.state is not None
    expected = EXPECTED[name]
    for state, ids in zip(STATES, expected["states"], strict=True):
        assert ids_of(model, layout.state(Generate(rid="", prompt=(state_text(state),)))) == ids
    for given, forms in zip(QUESTIONS.values(), expected["forms"], strict=True):
        assert [ids_of(model, form.body) for form in layout.forms(question(given), 1)] == forms


def forms_of(
    model: PreTrainedTokenizerFast, config: dict[str, Any], asked: Question, n: int = 1
) -> list[Form]:
    def encode(text: str) -> list[int]:
        return model.encode(text, add_special_tokens=False)

    return [*decider_layout(decider_config(config), encode).forms(asked, n)]


def test_options_of_labels(model: PreTrainedTokenizerFast) -> None:
    (noul,) = forms_of(model, {}, question(QUESTIONS["noul"]))
    assert noul.spellings == (
        (1, (model.convert_tokens_to_ids("A"),)),
        (0, (model.convert_tokens_to_ids("B"),)),
    )
    (wide,) = forms_of(model, {}, question(QUESTIONS["all"]))
    assert [option for option, _ in wide.spellings] == list(range(255))
    assert model.decode([token for _, tokens in wide.spellings[24:29] for token in tokens]) == "YZAAABAC"
    levels = forms_of(model, {"isolated_levels": True}, question(QUESTIONS["score"]))
    assert [form.about for form in levels] == [0, 1, 2]
    assert all([option for option, _ in form.spellings] == [1, 0] for form in levels)


def test_orders_of_a_choice(model: PreTrainedTokenizerFast) -> None:
    first, second = forms_of(model, {}, question(QUESTIONS["pair"]), 2)
    assert [option for option, _ in second.spellings] == [1, 0]
    assert model.decode(ids_of(model, second.body)) == (
        "\n\nQuestion: Which team?\nOptions:\n(A) returns: goods\n(B) billing\nAnswer: ("
    )
    assert [text for _, text in first.spellings] == [text for _, text in second.spellings]


def test_more_options_than_labels_of_one_token() -> None:
    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    layout = decider_layout(DeciderConfig(), encode)
    options = tuple(Option(name=str(n)) for n in range(27))
    assert [*layout.forms(Question(kind="choice", options=options[:26]), 1)]
    with pytest.raises(UnsupportedField, match=r"27 options.* 26 labels"):
        list(layout.forms(Question(kind="choice", options=options), 1))


def test_levels_named_by_words(model: PreTrainedTokenizerFast) -> None:
    levels = (
        Option(name="low"),
        Option(name="high", description="now"),
        Option(name="2", description="0: x"),
    )
    asked = Question(kind="score", instructions="How?", options=levels)
    (listed,) = forms_of(model, {}, asked)
    assert "\n(A) 0: low\n(B) 1: high: now\n(C) 2: 0: x\n" in model.decode(ids_of(model, listed.body))
    texts = [
        model.decode(ids_of(model, one.body)) for one in forms_of(model, {"isolated_levels": True}, asked)
    ]
    for text, level in zip(texts, ("low", "high: now", "x"), strict=True):
        assert f"\nProposed answer: {level}\nDoes" in text


def test_state_of_a_chat(model: PreTrainedTokenizerFast) -> None:
    layout = decider_layout(DeciderConfig(), lambda text: ())
    assert layout.state is not None
    turns = (ChatMessage(role="user", content="é"), ChatMessage(role="assistant", content="b"))
    assert layout.state(Generate(rid="", chat=turns[:1])) == ("Context:\n", "é")
    assert layout.state(Generate(rid="", chat=turns)) == (
        "Context:\n",
        '[{"role": "user", "content": "é"}, {"role": "assistant", "content": "b"}]',
    )


def test_temperatures() -> None:
    by_type = decider_config({"temperature": 1.3, "temperature_by_type": {"noul": 2.0}}).calibration
    assert [temperature(by_type, kind, 4) for kind in ("choice", "predicate", "score")] == [1.3, 2.0, 1.3]
    options = {"temperature_by_options": {"a": 10.0, "b": -3.0, "min": 0.5}, "isolated_levels": True}
    by_options = decider_config(options).calibration
    assert temperature(by_options, "choice", 4) == 10.0 - 3.0 * log(4)
    assert temperature(by_options, "choice", 255) == 0.5
    assert temperature(by_options, "score", 9) == 10.0 - 3.0 * log(2)
    assert by_options.layout == decider_config(options).layout == "decider-1"


def test_temperature_of_isolated_levels_holds_for_each_form() -> None:
    calibration = decider_config({"isolated_levels": True, "temperature": 2.0}).calibration
    yes = (0.8, 0.5, 0.1)
    forms = tuple(
        FormScores(options=(1, 0), logprobs=(log(1 - p), log(p)), lengths=(1, 1), about=level)
        for level, p in enumerate(yes)
    )
    asked = Question(kind="score", options=tuple(Option(name=str(level)) for level in range(3)))
    found = answer(asked, QuestionScores(layout="decider-1", forms=forms), calibration=calibration)
    tempered = [p**0.5 / (p**0.5 + (1 - p) ** 0.5) for p in yes]
    assert found.probabilities == pytest.approx([p / sum(tempered) for p in tempered], abs=1e-12)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"layout": "new"}, "layout = 'new'"),
        ({"layout": "plain", "chat_template": True}, "layout = 'plain'"),
        ({"temperature": 0}, "temperature of choice = 0"),
        ({"temperature": True}, "temperature of choice = True"),
        ({"temperature_by_type": {"bool": 1.0}}, "temperature_by_type"),
        ({"temperature_by_type": {"noul": "hot"}}, "temperature of noul = 'hot'"),
        ({"temperature_by_options": {"a": 1.0}}, "temperature_by_options"),
        ({"temperature_by_options": {"a": 1, "b": 1}, "temperature_by_type": {"noul": 1}}, "by_options"),
    ],
)
def test_wrong_configurations(content: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named) as caught:
        decider_config(content)
    assert caught.value.field == "model"


def test_recognition(tmp_path: Path) -> None:
    assert trained(tmp_path, {}) is None
    gguf = tmp_path / "a.gguf"
    other = trained(gguf, {"general.architecture": "qwen35", "qwen35.decision.type": "kev"})
    assert other == Other("a decision model of the type 'kev'", "qwen35.decision.type")
    (tmp_path / "kev_config.json").write_text("{}")
    assert trained(gguf, {}) is None  # a folder of GGUF files may hold others' files
    other = trained(tmp_path, {})
    assert isinstance(other, Other)
    for use in (
        lambda: other.refusing.forms(question(QUESTIONS["noul"]), 1),
        lambda: other.refusing.state(Generate(rid="")),
    ):
        with pytest.raises(UnsupportedField, match=r"Kev checkpoint \(kev_config.json\)") as caught:
            use()
        assert caught.value.field == "decide.layout"
    (tmp_path / "decider_config.json").write_text('{"layout": "chat"}')
    for weights in (tmp_path, gguf):
        assert trained(weights, {}) == decider_config({"layout": "chat"})
    (tmp_path / "decider_config.json").write_text("[]")
    with pytest.raises(InvalidRequest, match="is not a JSON object"):
        trained(tmp_path, {})


def render(messages: Sequence[Mapping[str, str]]) -> str:
    *system, query, document = (turn["content"] for turn in messages)
    return f"<|im_start|>{(system or ['Judge.'])[0]}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"


def test_rerankers(tmp_path: Path) -> None:
    (tmp_path / "1_LogitScore").mkdir()
    file = tmp_path / "1_LogitScore" / "config.json"
    file.write_text('{"true_token_id": 7, "false_token_id": null}')
    with pytest.raises(InvalidRequest, match="7 for true and None for false"):
        trained(tmp_path, {})
    file.write_text('{"true_token_id": 7, "false_token_id": 3}')
    config = trained(tmp_path, {})
    assert config == LogitScoreConfig(7, 3)
    layout = logit_score_layout(config, render)
    assert layout.state is not None
    asked = Question(
        kind="predicate", instructions="a document", options=(Option(name="t"), Option(name="f"))
    )
    (form,) = layout.forms(asked, 1)
    state = layout.state(Generate(rid="", prompt=("a query?",)))
    assert "".join(map(str, state)) == "<|im_start|>Judge.\n<Query>: a query?\n<Document>:"
    turns = (ChatMessage(role="system", content="Find."), ChatMessage(role="user", content="q"))
    state = layout.state(Generate(rid="", chat=turns))
    assert "".join(map(str, state)) == "<|im_start|>Find.\n<Query>: q\n<Document>:"
    with pytest.raises(UnsupportedField, match="not a conversation"):
        layout.state(Generate(rid="", chat=turns[::-1]))
    assert form.body == (" a document<|im_end|>\n",)
    assert form.spellings == ((0, (7,)), (1, (3,)))
    for asked in (question(QUESTIONS["noul"]), question(QUESTIONS["pair"])):
        with pytest.raises(UnsupportedField, match="reranker"):
            layout.forms(asked, 1)
    for wrong in (lambda turns: render(turns[::-1]), lambda turns: 2 * render(turns), lambda turns: ""):
        with pytest.raises(InvalidRequest, match="does not write a query"):
            logit_score_layout(config, wrong)
    uninstructed = logit_score_layout(config, lambda turns: render(turns[-2:])).state
    assert uninstructed is not None
    with pytest.raises(UnsupportedField, match="takes no instruction"):
        uninstructed(Generate(rid="", chat=turns))


def test_a_conversation_with_tools_is_refused_by_a_decider() -> None:
    layout = decider_layout(decider_config({}), lambda text: [])
    turns = [ChatMessage(role="user", content="refund 7"), ChatMessage(role="tool", content="ok")]
    assert layout.state is not None
    with pytest.raises(UnsupportedField, match="Calls of tools"):
        layout.state(Generate(rid="", chat=tuple(turns)))
