"""Chat templates that render tools the way well-known families of models do, cut down to what matters."""

from __future__ import annotations

QWEN = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}<tools>"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n"
    "</tool_response><|im_end|>\n"
    "{% elif not (loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{% set call = call.function %}"
    "{{ '\n' if message.content or not loop.first }}<tool_call>\n"
    '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
QWEN_CODER = QWEN.replace('{"name": "{{ call.name }}", "arguments": ', "<function={{ call.name }}>")

LLAMA3 = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.tool_calls %}"
    "{% if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ message.tool_calls[0].function.name }}", '
    '"parameters": {{ message.tool_calls[0].function.arguments | tojson }}}<|eot_id|>'
    "{% elif message.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ message.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{% if loop.first and tools %}{{ tools | tojson }}\n\n{% endif %}"
    "{{ message.content }}<|eot_id|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

MISTRAL = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}"
    "{% if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ message.content }}[/INST]"
    "{% elif message.tool_calls %}[TOOL_CALLS]["
    "{% for call in message.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    '{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}'
    "{{ '' if loop.last else ', ' }}{% endfor %}]{{ eos_token }}"
    "{% elif message.role == 'assistant' %}{{ message.content }}{{ eos_token }}"
    "{% elif message.role == 'tool' %}"
    '[TOOL_RESULTS]{"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}'
    "[/TOOL_RESULTS]"
    "{% else %}{{ raise_exception('no such role') }}{% endif %}"
    "{% endfor %}"
)
MISTRAL_SPACED = MISTRAL.replace("[TOOL_CALLS][", "[TOOL_CALLS] [")

TOOL_TEMPLATES = {
    "hermes": QWEN,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral-spaced": MISTRAL_SPACED,
    "generic": QWEN_CODER,
}
"""Format of tool calls → a template that writes it."""
