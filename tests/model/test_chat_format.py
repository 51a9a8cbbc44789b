"""The pieces of chat templates, against the templates themselves."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from ramify.runtime.model.tokenizer.chat_format import chat_format, compose
from tests.model.tool_templates import QWEN, TOOL_TEMPLATES

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('role') }}{% endif %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# The system turn lies inside the first user turn; turns must alternate.
LLAMA2 = (
    "{% if messages[0].role == 'system' %}"
    "{% set turns = messages[1:] %}{% set system = messages[0].content %}"
    "{% else %}{% set turns = messages %}{% set system = none %}{% endif %}"
    "{% for message in turns %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% if loop.first and system is not none %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message.content %}"
    "{% else %}{% set content = message.content %}{% endif %}"
    "{% if message.role == 'user' %}{{ bos_token + '[INST] ' + content + ' [/INST]' }}"
    "{% elif message.role == 'assistant' %}{{ SPACE + content + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('role') }}{% endif %}"
    "{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% elif message.role == 'assistant' %}{{ message.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    backend = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    found = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    found.chat_template = template
    return found


def test_chatml_with_a_default_system_turn() -> None:
    pieces = chat_format(tokenizer(CHATML))
    assert pieces.exact
    assert pieces.suffix["user"] == pieces.suffix["system"] == pieces.suffix["assistant"] == "<|im_end|>\n"
    assert pieces.prefix[">system"] == "<|im_start|>system\n"
    assert pieces.prefix[">user"] == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"
    assert pieces.prefix["system>user"] == pieces.prefix["assistant>user"] == "<|im_start|>user\n"
    assert pieces.prefix["user>assistant"] == "<|im_start|>assistant\n"
    assert pieces.prefix["assistant>tool"] == "<|im_start|>tool\n"


def test_llama_3() -> None:
    pieces = chat_format(tokenizer(LLAMA3))
    assert pieces.exact
    assert pieces.prefix[">user"] == "<s><|start_header_id|>user<|end_header_id|>\n\n"
    assert pieces.prefix["user>assistant"] == "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert pieces.suffix["assistant"] == "<|eot_id|>"
    assert not any("tool" in key for key in pieces.prefix)


def test_a_system_turn_inside_the_first_user_turn() -> None:
    pieces = chat_format(tokenizer(LLAMA2.replace("SPACE", "''")))
    assert pieces.exact
    assert pieces.prefix[">system"] + "S" + pieces.suffix["system"] + pieces.prefix["system>user"] == (
        "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\n"
    )
    assert pieces.suffix["user"] == " [/INST]"
    assert pieces.suffix["assistant"] == " </s>"
    assert pieces.prefix["assistant>user"] == "<s>[INST] "
    assert "user>user" not in pieces.prefix
    assert ">assistant" not in pieces.prefix


def test_a_blank_before_old_answers_is_left_to_the_model() -> None:
    """Llama 2 shows answers after a blank that it does not put before a new one."""
    pieces = chat_format(tokenizer(LLAMA2.replace("SPACE", "' '")))
    assert not pieces.exact
    assert pieces.prefix["user>assistant"] == ""
    assert compose(pieces, [("user", "hi")], generation=True) == "<s>[INST] hi [/INST]"


def test_no_system_role() -> None:
    pieces = chat_format(tokenizer(MISTRAL))
    assert pieces.exact
    assert pieces.prefix == {
        ">user": "<s>[INST] ",
        ">assistant": "<s>",
        "user>assistant": "",
        "user>user": "[INST] ",
        "assistant>user": "[INST] ",
        "assistant>assistant": "",
    }
    assert pieces.suffix == {"user": " [/INST]", "assistant": "</s>"}


def test_no_generation_prompt() -> None:
    """Text that precedes an old answer precedes a new one, if the template has no generation prompt."""
    pieces = chat_format(tokenizer(CHATML.partition("{% if add_generation_prompt")[0]))
    assert pieces.exact
    assert pieces.prefix["user>assistant"] == "<|im_start|>assistant\n"


def test_generation_prompt_goes_before_history() -> None:
    """Reasoning models put an empty thought before a new answer that old answers do not show."""
    template = CHATML.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think></think>{% endif %}"
    )
    assert template != CHATML
    pieces = chat_format(tokenizer(template))
    assert not pieces.exact
    assert pieces.prefix["user>assistant"] == "<|im_start|>assistant\n<think></think>"
    assert pieces.prefix["assistant>user"] == "<|im_start|>user\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("message['content']", "message['content'] | trim"),
        ("message['content']", "(message['content'] or 'nothing')"),
        ("message['content']", "message['content'] | replace('<b>', '')"),
        ("{{ message['content'] }}", "{{ message['content'] }}{% if loop.last %}!{% endif %}"),
        (
            "{% for message",
            "{% if messages | length > 4 %}{{ raise_exception('long') }}{% endif %}{% for message",
        ),
    ],
    ids=["strips", "fills in", "rewrites", "last is special", "refuses long ones"],
)
def test_what_pieces_cannot_say_is_not_exact(old: str, new: str) -> None:
    template = CHATML.replace(old, new)
    assert template != CHATML
    pieces = chat_format(tokenizer(template))
    assert not pieces.exact


@pytest.mark.parametrize("template", [CHATML, LLAMA3, LLAMA2.replace("SPACE", "''"), MISTRAL])
def test_composing_gives_the_template(template: str) -> None:
    source = tokenizer(template)
    pieces = chat_format(source)
    assert pieces is not None
    turns = [("user", "Why {{ 1 }}?"), ("assistant", "…"), ("user", "A\n"), ("assistant", "B"), ("user", "C")]
    for count in range(1, len(turns) + 1):
        part = turns[:count]
        chat = [{"role": role, "content": content} for role, content in part]
        for generation in (False, True):
            if generation and part[-1][0] == "assistant":
                continue
            wanted = source.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation)
            assert compose(pieces, part, generation=generation) == wanted
    assert all(f"{a}>{b}" in pieces.prefix for (a, _), (b, _) in pairwise(turns))
    assert compose(pieces, [("nobody", "x")], generation=False) is None


@pytest.mark.parametrize("template", [None, "", "Hello.", "{{ raise_exception('no') }}", "{% for %}"])
def test_no_usable_template(template: str | None) -> None:
    assert chat_format(tokenizer(template)) is None


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_the_tool_format_is_found_by_probing(name: str) -> None:
    pieces = chat_format(tokenizer(TOOL_TEMPLATES[name]))
    assert pieces.tool_format == name


def test_a_template_that_hides_the_tools_gets_the_generic_format() -> None:
    hidden = QWEN.replace("{{ tool | tojson }}", "")
    for template in (CHATML, LLAMA3, LLAMA2.replace("SPACE", "''"), MISTRAL, hidden):
        pieces = chat_format(tokenizer(template))
        assert pieces.tool_format == "generic"


def test_the_variables_of_a_template() -> None:
    pieces = chat_format(tokenizer(QWEN))
    assert pieces.variables == ("enable_thinking",)
    marked = chat_format(tokenizer("{% generation %}" + CHATML + "{{ tone }}{%- endgeneration -%}"))
    assert marked.variables == ("tone",)
