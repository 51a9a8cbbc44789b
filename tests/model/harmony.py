"""A tokenizer with gpt-oss's control tokens, and a chat template that writes what its own does.

The format: https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.runtime.tiny import write_tokenizer

SPECIAL = ["<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"]
"""Tokens 256 and up; the first is the tiny models' end token."""

TEMPLATE = """\
{%- macro kind(spec) -%}
{{ {'integer': 'number'}.get(spec.type, spec.type) }}
{%- endmacro -%}
{%- set effort = reasoning_effort if reasoning_effort is defined else 'medium' -%}
<|start|>system<|message|>You are a model.
Reasoning: {{ effort }}

# Valid channels: analysis, commentary, final.
{%- if tools %}
Calls to these tools must go to the commentary channel: 'functions'.{% endif -%}
<|end|>
{%- set first = messages[0].content if messages[0].role in ('system', 'developer') else '' -%}
{%- if first or tools -%}
<|start|>developer<|message|>
{%- if first %}# Instructions

{{ first }}

{% endif %}
{%- if tools %}# Tools

## functions

namespace functions {

{% for tool in tools %}// {{ tool.function.description }}
type {{ tool.function.name }} = (_: {
{% for name, spec in (tool.function.parameters.properties or {}).items() %}{{ name }}: {{ kind(spec) }},
{% endfor %}}) => any;

{% endfor %}} // namespace functions{% endif -%}
<|end|>
{%- endif -%}
{%- set called = namespace(name='') -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' and message.tool_calls -%}
{%- set later = namespace(answer=false) -%}
{%- for other in messages[loop.index:] -%}
{%- if other.role == 'assistant' and not other.tool_calls %}{% set later.answer = true %}{% endif -%}
{%- endfor -%}
{%- if message.content and message.thinking %}{{ raise_exception('thoughts or content') }}{% endif -%}
{%- set thought = message.thinking or message.content -%}
{%- if thought and not later.answer -%}
{{ '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}
{%- endif -%}
{%- set call = message.tool_calls[0].function -%}
{%- set called.name = call.name -%}
{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{ '<|call|>' }}
{%- elif message.role == 'assistant' -%}
{%- if loop.last and not add_generation_prompt and message.thinking -%}
{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif -%}
{{ '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif message.role == 'tool' -%}
{{ '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson }}{{ '<|end|>' }}
{%- elif message.role == 'user' -%}
{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif -%}
"""
"""Written for these tests after the description of the format: system message, instructions and tools of the
developer, thoughts that stay until the next answer."""


def marks_in(text: str) -> tuple[int, ...]:
    """`TextChunk.controls` of a text whose marks are all control tokens."""
    return tuple(mark.start() for mark in re.finditer("|".join(map(re.escape, SPECIAL)), text))


def write_harmony_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 263 tokens with `SPECIAL` and `TEMPLATE`."""
    write_tokenizer(folder, SPECIAL, TEMPLATE, end=SPECIAL[0])
