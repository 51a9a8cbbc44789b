"""Chat templates of well-known families, without the parts that no test reaches."""

from __future__ import annotations

from typing import Any

from ramify.model_info import ChatFormat
from ramify.runtime.model.tokenizer.chat_format import chat_format
from tests.model.test_chat_format import tokenizer

SMOLLM2 = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_QWEN_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + LEAD }}"
    "{%- else %}{{- DEFAULT }}{%- endif %}"
    '{{- "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n'
    'You are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}'
    "{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": '
    "<args-json-object>}\n</tool_call><|im_end|>\n' }}"
    "{%- else %}"
    "{%- if messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{%- else %}{{- PLAIN }}{%- endif %}{%- endif %}"
)
_QWEN_CALLS = (
    "{%- if message.tool_calls %}{%- for tool_call in message.tool_calls %}"
    "{%- if BREAK %}{{- '\n' }}{%- endif %}"
    "{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}"
    '{{- \'<tool_call>\n{"name": "\' }}{{- tool_call.name }}{{- \'", "arguments": \' }}'
    "{{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\n' }}"
)
_QWEN_RESULTS = (
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' }}{{- message.content }}{{- '\n</tool_response>' }}"
    "{%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
)
_QWEN_NAME = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."

QWEN25 = (
    _QWEN_TOOLS.replace("LEAD", "'\n\n'")
    .replace("DEFAULT", f"'{_QWEN_NAME}\n\n'")
    .replace("PLAIN", f"'<|im_start|>system\n{_QWEN_NAME}<|im_end|>\n'")
    + "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) or "
    "(message.role == 'assistant' and not message.tool_calls) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>' + message.role }}"
    "{%- if message.content %}{{- '\n' + message.content }}{%- endif %}"
    + _QWEN_CALLS.replace("BREAK", "true")
    + _QWEN_RESULTS
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)

QWEN3 = (
    _QWEN_TOOLS.replace("LEAD", "'\n\n'").replace("DEFAULT", "''").replace("PLAIN", "''")
    + "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.multi_step_tool and message.role == 'user' %}"
    "{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{%- set content = message.content %}{%- set reasoning = '' %}"
    "{%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}"
    "{{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' "
    "+ content.lstrip('\n') }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}{%- endif %}"
    + _QWEN_CALLS.replace("BREAK", "(loop.first and content) or (not loop.first)")
    + _QWEN_RESULTS
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}"
    "{%- endif %}{%- endif %}"
)

LLAMA31 = (
    "{{- bos_token }}"
    "{%- if tools_in_user_message is not defined %}{%- set tools_in_user_message = true %}{%- endif %}"
    "{%- if messages[0]['role'] == 'system' %}"
    "{%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}"
    "{%- else %}{%- set system_message = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{%- if tools %}{{- 'Environment: ipython\n' }}{%- endif %}"
    "{{- 'Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n' }}"
    "{{- system_message }}{{- '<|eot_id|>' }}"
    "{%- if tools_in_user_message and tools %}"
    "{%- if messages|length != 0 %}{%- set first_user_message = messages[0]['content']|trim %}"
    "{%- set messages = messages[1:] %}"
    "{%- else %}{{- raise_exception('Cannot put tools in the first user message without one.') }}{%- endif %}"
    "{{- '<|start_header_id|>user<|end_header_id|>\n\n' -}}"
    "{{- 'Given the following functions, please respond with a JSON for a function call with its proper "
    "arguments that best answers the given prompt.\n\n' }}"
    '{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument name and its '
    "value}.' }}{{- 'Do not use variables.\n\n' }}"
    "{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}"
    "{{- first_user_message + '<|eot_id|>'}}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + "
    "'<|eot_id|>' }}"
    "{%- elif 'tool_calls' in message %}"
    "{%- if not message.tool_calls|length == 1 %}{{- raise_exception('single tool-calls only') }}{%- endif %}"
    "{%- set tool_call = message.tool_calls[0].function %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}"
    "{{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}"
    "{{- tool_call.arguments | tojson }}{{- '}' }}{{- '<|eot_id|>' }}"
    "{%- elif message.role == 'tool' or message.role == 'ipython' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
    "{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}"
    "{%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)

MISTRAL_V3 = (
    "{%- if messages[0]['role'] == 'system' %}"
    "{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}"
    "{%- else %}{%- set loop_messages = messages %}{%- endif %}"
    "{%- set user_messages = loop_messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{- bos_token }}"
    "{%- for message in loop_messages %}"
    "{%- if message['role'] == 'user' %}"
    "{%- if tools and (message == user_messages[-1]) %}"
    "{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{%- if loop.last and system_message is defined %}"
    "{{- '[INST] ' + system_message + '\n\n' + message['content'] + '[/INST]' }}"
    "{%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}"
    "{%- elif message.tool_calls is defined and message.tool_calls %}"
    "{{- '[TOOL_CALLS] [' }}{%- for tool_call in message.tool_calls %}"
    "{%- set out = tool_call.function|tojson %}{{- out[:-1] }}"
    "{{- ', \"id\": \"' + tool_call.id + '\"}' }}"
    "{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}{%- endfor %}"
    "{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}"
    "{%- elif message['role'] == 'tool' %}"
    "{{- '[TOOL_RESULTS] {\"content\": ' + message['content']|string + ', \"call_id\": \"' "
    "+ message.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{%- else %}{{- raise_exception('Only user and assistant roles are supported') }}{%- endif %}"
    "{%- endfor %}"
)
"""A template with the system text and the tools in the last user turn."""

TEMPLATES = {
    "smollm2": SMOLLM2,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "llama-3.1": LLAMA31,
    "mistral-v0.3": MISTRAL_V3,
}

DEEPSEEK_R1 = (
    "{%- set ns = namespace(system_prompt='') %}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}"
    "{%- set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}"
    "{{ bos_token }}{{ ns.system_prompt }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}"
    "{%- set content = message['content'] %}"
    "{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}"
    "{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
"""A template that always opens the thoughts itself, and leaves out those of earlier turns."""

DEEPSEEK_V31 = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    "{{ bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{{ message['content'] }}{%- endif %}"
    "{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{%- endif %}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- set content = message['content'] %}"
    "{%- if '</think>' in content %}{%- set content = content.split('</think>', 1)[1] %}{%- endif %}"
    "{{ '<｜Assistant｜></think>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}"
    "{%- if thinking %}{{ '<think>' }}{%- else %}{{ '</think>' }}{%- endif %}{%- endif %}"
)
"""A template of a model that thinks only on request."""

GLM45 = (
    "[gMASK]<sop>"
    "{%- set ns = namespace(last_user_index=-1) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last_user_index = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{ '<|user|>\n' + m.content }}"
    "{{- '/nothink' if (enable_thinking is defined and not enable_thinking "
    "and not m.content.endswith('/nothink')) else '' -}}"
    "{%- elif m.role == 'system' %}{{ '<|system|>\n' + m.content }}"
    "{%- elif m.role == 'tool' %}"
    "{{ '<|observation|>\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- elif m.role == 'assistant' %}{{ '<|assistant|>' }}"
    "{%- set content = m.content %}{%- set reasoning = '' %}"
    "{%- if m.reasoning_content is string %}{%- set reasoning = m.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last_user_index and reasoning %}"
    "{{ '\n<think>' + reasoning.strip() + '</think>' }}"
    "{%- else %}{{ '\n<think></think>' }}{%- endif %}"
    "{%- if content.strip() %}{{ '\n' + content.strip() }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{{- '\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}{%- endif %}"
)

GPT_OSS = (
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}"
    "{%- if loop.last and not add_generation_prompt %}"
    "{%- if 'thinking' in message %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}"
    "{%- else %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- endif %}"
    "{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{%- endif %}"
)
"""A template like that of gpt-oss: thoughts and answer are messages of their own, in two channels."""

KEEPING = (
    "{%- for message in messages %}"
    "{{ '<|' + message.role + '|>' }}"
    "{%- if message.reasoning_content %}{{ '[THINK]' + message.reasoning_content + '[/THINK]' }}{%- endif %}"
    "{{ message.content + '<|end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"
)
"""A template that keeps the thoughts of earlier turns, as some models for agents do."""

THINKING = {
    "qwen3": QWEN3,
    "deepseek-r1": DEEPSEEK_R1,
    "deepseek-v3.1": DEEPSEEK_V31,
    "glm-4.5": GLM45,
    "gpt-oss": GPT_OSS,
    "keeping": KEEPING,
}

ALL = {**TEMPLATES, **THINKING}


def pieces_of(name: str) -> ChatFormat:
    """The pieces of a template that programs append."""
    found = chat_format(tokenizer(ALL[name]))
    assert found is not None
    return found


def rendered(name: str, messages: list[dict[str, Any]], **given: Any) -> str:
    """The prompt of `messages` as the template itself renders it."""
    text = tokenizer(ALL[name]).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **given
    )
    assert isinstance(text, str)
    return text
