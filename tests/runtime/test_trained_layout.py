"""The tokenizer process with a trained checkpoint: its layout, and what that layout does not have."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from ramify.decisions.decider import decider_config
from ramify.decisions.logit_score import LogitScoreConfig
from ramify.decisions.trained import Other
from ramify.engine_messages import Submit
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import ChatMessage, Generate
from ramify.questions import PREDICATE_OPTIONS, Decide, Option, Question
from ramify.runtime.processes.tokenizer import PromptTokenizer
from ramify.runtime.processes.trained_layout import trained_layout
from ramify.sampling_params import SamplingParams
from tests.decisions.decider_cases import CONFIGS, IDS, STATES, tokenizer

STATE = STATES[0]
PAIR = Question(
    kind="choice",
    instructions="Which team?",
    options=(Option(name="billing"), Option(name="returns", description="goods")),
)
LATE = Question(kind="predicate", instructions="Is it late?", options=PREDICATE_OPTIONS)
RERANKER = (
    "{%- set query = messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first -%}"
    "{%- set text = messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first -%}"
    "<|im_start|>user\n<Query>: {{ query }}\n<Document>: {{ text }}<|im_end|>\n"
)


def submit(prompts: PromptTokenizer, *questions: Question, **fields: Any) -> Submit:
    own = {name: fields.pop(name) for name in Decide.__struct_fields__ if name in fields}
    decide = Decide(questions=questions, **own)
    return prompts.submit(
        Generate(
            rid="r", decide=decide, sampling=SamplingParams(max_tokens=0), **({"prompt": (STATE,)} | fields)
        )
    )


def of_decider(name: str) -> PromptTokenizer:
    model = tokenizer()
    first = ("<|im_start|>", model.convert_tokens_to_ids("<|im_start|>"))
    model.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first[0]} $A", special_tokens=[first]
    )
    return PromptTokenizer(model, trained=trained_layout(decider_config(CONFIGS[name]), model))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layout", ["auto", "trained"])
def test_ids_of_the_package(name: str, layout: str) -> None:
    expected = json.loads(IDS.read_text())[name]
    prompts = of_decider(name)
    for given in ({"prompt": (STATE,)}, {"prompt": (), "chat": (ChatMessage(role="user", content=STATE),)}):
        found = submit(prompts, PAIR, layout=layout, **given)
        assert list(found.ids) == expected["states"][0]
        assert found.decide is not None
        (question,) = found.decide.questions
        assert question.layout == ("decider-chat-1" if name == "chat" else "decider-1")
        assert [list(form.ids) for form in question.forms] == expected["forms"][0]
        assert [form.options for form in question.forms] == [(0, 1)]


def test_other_layouts_of_a_decider() -> None:
    prompts = of_decider("plain")
    found = submit(prompts, LATE, layout="verbatim").decide
    assert found is not None
    assert found.questions[0].layout == "verbatim-1"
    # A client that writes the texts around the questions has written the state for another layout.
    found = submit(prompts, LATE, closing="\n").decide
    assert found is not None
    assert found.questions[0].layout == "verbatim-1"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layout": "trained", "opening": "\n"}, "decide.opening"),
        ({"layout": "trained", "closing": "\n"}, "decide.closing"),
        ({"end": "turn"}, "decide.end"),
    ],
)
def test_fields_without_effect(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedField) as caught:
        submit(of_decider("plain"), LATE, **fields)
    assert caught.value.field == named


def test_unsupported_checkpoints_are_refused_by_name() -> None:
    prompts = PromptTokenizer(
        tokenizer(), trained=trained_layout(Other("a Kev checkpoint", "kev_config.json"), None)
    )
    for layout in ("auto", "trained"):
        with pytest.raises(UnsupportedField, match="Kev checkpoint") as caught:
            submit(prompts, LATE, layout=layout)
        assert caught.value.field == "decide.layout"
    assert submit(prompts, LATE, layout="verbatim").decide is not None


def test_models_without_a_layout() -> None:
    prompts = PromptTokenizer(tokenizer(), trained=trained_layout(None, None))
    with pytest.raises(UnsupportedField, match="No layout is known"):
        submit(prompts, LATE, layout="trained")
    found = submit(prompts, LATE).decide
    assert found is not None
    assert found.questions[0].layout == "verbatim-1"


@pytest.mark.parametrize("texts", [("late?", "Late again."), ("a\n", "1 b"), ("(", ' "x"'), ("A", "")])
@pytest.mark.parametrize("special", [True, False])
def test_rerankers_have_the_ids_of_their_template(texts: tuple[str, str], special: bool) -> None:
    """The template's own special tokens stay special where those in texts do not."""
    query, document = texts
    model = tokenizer()
    model.backend_tokenizer.pre_tokenizer = ByteLevel(
        add_prefix_space=False
    )  # splits before blanks, as Qwen's
    model.chat_template = RERANKER
    layout = trained_layout(LogitScoreConfig(7, 3), model)
    prompts = PromptTokenizer(model, trained=layout, special_in_messages=special)
    asked = Question(kind="predicate", instructions=document, options=PREDICATE_OPTIONS)
    found = submit(prompts, asked, prompt=(query,)).decide
    state = submit(prompts, asked, prompt=(query,)).ids
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    whole = model.encode(model.apply_chat_template(messages, tokenize=False), add_special_tokens=False)
    assert found is not None
    (form,) = found.questions[0].forms
    assert [*state, *form.ids] == whole
    assert (form.paths, form.options) == (((7,), (3,)), (0, 1))


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (None, "needs a chat template"),
        ("{{ raise_exception('no') }}", "refuses"),
        ("{% for one in messages %}{{ one.content }}{{ one.content }}{% endfor %}", "exactly once"),
    ],
)
def test_templates_that_a_chat_layout_cannot_use(template: str | None, named: str) -> None:
    model = tokenizer()
    model.chat_template = template
    with pytest.raises(InvalidRequest, match=named) as caught:
        trained_layout(decider_config({"layout": "chat"}), model)
    assert caught.value.field == "model"


def test_open_thoughts_are_closed() -> None:
    model = tokenizer()
    model.chat_template = "{{ messages[0].content }}<|im_end|>assistant\n{{ '<think>\n' }}"
    prompts = PromptTokenizer(model, trained=trained_layout(decider_config({"layout": "chat"}), model))
    found = submit(prompts, LATE).decide
    assert found is not None
    text = model.decode(found.questions[0].forms[0].ids)
    assert text.endswith("<|im_end|>assistant\n<think>\n</think>\n\nAnswer: (")
