"""A model that plays a script: a one-layer Llama with weights set by hand.

With tools in the prompt it writes a given call. With a result in the prompt, or without tools, it says a
given sentence. Then it ends. Prompts may have 131,072 tokens. Sampling at usual temperatures gives the same.

    position   0 1 2 3 4 5        script of the token ids 7 8 9 7 5
    heads      1..K look 1..K tokens back: at position 4 they bring the codes of 7 9 8 (K = 3)
    neuron     one for each place of the script, with the K + 1 tokens before that place: 7 8 9 7 → 5
    output     the neuron that fires puts its token above all others, and the longest match wins

A token's code is a row of a Hadamard matrix; tokens outside the script share one. The keys of all positions
are equal, and the rotary embedding turns them with the position: the query of head k is turned back by k.
Two more heads search the whole prompt for the marks that the chat template writes before tools and before
results. Their keys lie in pairs of numbers that the rotary embedding hardly turns.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

CODE = 64
"""Numbers in a token's code, and in a head."""
CONTEXT = 131072
ROPE_BASE = 1e8
LOCAL_PAIRS = 10
"""Pairs of a head that tell positions apart: they turn by 1 to 0.0056 radians a token."""
TOOLS_PAIR, RESULT_PAIR = 29, 31
"""Pairs that turn by less than 0.01 radians in `CONTEXT` tokens."""
MOST_BACK = 12
TOOLS_MARK, RESULT_MARK = "<jupyter_code>", "<jupyter_output>"
"""Single tokens of SmolLM2's vocabulary that no text has."""

TOOLS = """{{ '\\n# Tools\\nTOOLS_MARK\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nA call is a JSON object with name and arguments between <tool_call> tags.\\n' }}"""
TEMPLATE = """\
{%- set system = messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' %}
{{- '<|im_start|>system\\n' }}
FIRST
{{- system }}
LAST
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>tool\\nRESULT_MARK' + message.content + '<|im_end|>\\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        PLAIN
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
PLAIN = """{%- if message.role == 'user' and 'COMMAND' in message.content %}
    {{- 'RESULT_MARK' if 'Output from ' in message.content else 'TOOLS_MARK' }}
{%- elif message.role == 'user' and 'once more' in message.content %}{{ 'RESULT_MARK' }}{%- endif %}"""
"""Marks for an agent without tools, which proposes commands as text and sends their output as a message."""
ANSWER = "<|im_end|>\n<|im_start|>assistant\n"
"""The end of each prompt."""


class Place(NamedTuple):
    """A place of the script: `token` comes behind `before` if the marks are in the prompt (True) or not."""

    before: list[int]
    marks: dict[str, bool]
    token: int


def call_text(tool: str, arguments: Mapping[str, object]) -> str:
    """A call as models of the Hermes format write it."""
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def template(*, tools_first: bool, command: str = "") -> str:
    """The chat template. It shows tools before or behind the system message; `command` is that of an agent
    without tools."""
    tools = "{%- if tools %}" + TOOLS + "{%- endif %}"
    text = TEMPLATE.replace("FIRST", tools if tools_first else "").replace(
        "LAST", "" if tools_first else tools
    )
    text = text.replace("PLAIN", PLAIN.replace("COMMAND", command) if command else "")
    return text.replace("TOOLS_MARK", TOOLS_MARK).replace("RESULT_MARK", RESULT_MARK)


def write(folder: Path, tokenizer: Path, *, call: str, final: str, template: str) -> None:
    """Write the model into `folder`, with SmolLM2's tokenizer from the folder `tokenizer`."""
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    marks = {"tools": _ids(encoder, TOOLS_MARK)[0], "result": _ids(encoder, RESULT_MARK)[0]}
    end = _ids(encoder, "<|im_end|>")[0]
    back, places = _places(encoder, call, final)
    config, tensors = _weights(encoder.get_vocab_size(), marks, end, back, places)
    folder.mkdir(parents=True)
    stored = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(stored, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "chat_template.jinja").write_text(template)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)


def _ids(encoder: Tokenizer, text: str) -> list[int]:
    return list(encoder.encode(text, add_special_tokens=False).ids)


def _places(encoder: Tokenizer, call: str, final: str) -> tuple[int, list[Place]]:
    """The number of heads that look back, and all places of both answers."""
    start = len(_ids(encoder, ANSWER))
    scripts = {text: _ids(encoder, ANSWER + text + "<|im_end|>") for text in (call, final)}
    begin = {
        call: [{"tools": True, "result": False}],
        final: [{"result": True}, {"tools": False, "result": False}],
    }
    for back in range(start - 1, MOST_BACK + 1):
        places, following = [], dict[tuple[int, ...], int]()
        unclear = False
        for text, script in scripts.items():
            places += [Place(script[:start], marks, script[start]) for marks in begin[text]]
            for at in range(start + 1, len(script)):
                before = script[max(0, at - back - 1) : at]
                unclear |= following.setdefault(tuple(before), script[at]) != script[at]
                places.append(Place(before, {}, script[at]))
        if not unclear:
            return back, places
    raise ValueError(f"A token of the script does not follow from the {MOST_BACK + 1} tokens before it.")


def _weights(
    vocab: int, marks: dict[str, int], end: int, back: int, places: list[Place]
) -> tuple[dict[str, object], dict[str, Tensor]]:
    """The configuration, and the tensors by their names in transformers."""
    signs = _hadamard(CODE)
    known = sorted({id for place in places for id in (*place.before, place.token)} | set(marks.values()))
    rows = torch.cat((signs[1:], -signs[1:]))  # the first row is for all other tokens
    if len(known) > len(rows):
        raise ValueError(f"The script has {len(known)} different tokens; {len(rows)} are possible.")
    code = dict(zip(known, rows, strict=False))
    outputs = {token: number for number, token in enumerate(sorted({place.token for place in places}))}

    # The residual: codes of this token, of earlier ones and of found marks; a constant; the outputs.
    slots = [0, *range(1, back + 1), "tools", "result"]
    slot = {name: slice(number * CODE, (number + 1) * CODE) for number, name in enumerate(slots)}
    constant = len(slots) * CODE
    hidden = _multiple(constant + 1 + len(outputs), 64)
    heads = _multiple(back + 2, 8)  # transformers wants a divisor of `hidden`; heads that are left do nothing
    inner = _multiple(len(places), 64)

    embedding = torch.zeros(vocab, hidden)
    embedding[:, :CODE] = signs[0]
    embedding[known, :CODE] = torch.stack([code[id] for id in known])
    embedding[:, constant] = 1

    # A norm multiplies an embedding by `scale`.
    scale = (hidden / (CODE + 1)) ** 0.5
    strength = 40 * CODE**0.5 / scale
    """One token beside the wanted one has a score that is lower by 28."""
    query = torch.zeros(heads, CODE, hidden)
    turn = ROPE_BASE ** (-torch.arange(LOCAL_PAIRS, dtype=torch.float64) / (CODE // 2))
    for head in range(back):
        query[head, :LOCAL_PAIRS, constant] = (strength * (turn * (head + 1)).cos()).float()
        query[head, CODE // 2 :, constant][:LOCAL_PAIRS] = (-strength * (turn * (head + 1)).sin()).float()
    key, value, output = (
        torch.zeros(CODE, hidden),
        torch.zeros(CODE, hidden),
        torch.zeros(hidden, heads * CODE),
    )
    key[:LOCAL_PAIRS, constant] = 1 / scale
    value[:, :CODE] = torch.eye(CODE) / scale
    for head, (pair, name) in enumerate(((TOOLS_PAIR, "tools"), (RESULT_PAIR, "result")), start=back):
        query[head, pair, constant] = strength
        key[pair, :CODE] = code[marks[name]] / CODE / scale
    for head, name in enumerate(slots[1:]):
        output[slot[name], head * CODE : (head + 1) * CODE] = torch.eye(CODE)

    gate, up, down = torch.zeros(inner, hidden), torch.zeros(inner, hidden), torch.zeros(hidden, inner)
    for neuron, place in enumerate(places):
        for distance, token in enumerate(reversed(place.before)):
            gate[neuron, slot[distance]] += code[token] / CODE
        for name, present in place.marks.items():
            gate[neuron, slot[name]] += (1 if present else -1) * code[marks[name]] / CODE
        # Each condition that holds adds 1, and all must hold.
        gate[neuron, constant] = 0.5 - len(place.before) - sum(place.marks.values())
        up[neuron, constant] = 1
        down[constant + 1 + outputs[place.token], neuron] = 10 + 5 * len(place.before)
    logits = torch.zeros(vocab, hidden)
    for token, number in outputs.items():
        logits[token, constant + 1 + number] = 6
    logits[end, constant] += 6  # the model ends where no neuron fires

    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": logits,
        "model.norm.weight": torch.ones(hidden),
        layer + "input_layernorm.weight": torch.ones(hidden),
        layer + "post_attention_layernorm.weight": torch.ones(hidden),
        layer + "self_attn.q_proj.weight": query.reshape(-1, hidden),
        layer + "self_attn.k_proj.weight": key,
        layer + "self_attn.v_proj.weight": value,
        layer + "self_attn.o_proj.weight": output,
        layer + "mlp.gate_proj.weight": gate * 60,
        layer + "mlp.up_proj.weight": up,
        layer + "mlp.down_proj.weight": down,
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": CODE,
        "vocab_size": vocab,
        "max_position_embeddings": CONTEXT,
        "rope_theta": ROPE_BASE,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": end,
        "dtype": "bfloat16",
        "hidden_act": "silu",
    }
    return config, tensors


def _hadamard(size: int) -> Tensor:
    rows = torch.ones(1, 1)
    while len(rows) < size:
        rows = torch.cat((torch.cat((rows, rows), 1), torch.cat((rows, -rows), 1)))
    return rows


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of
