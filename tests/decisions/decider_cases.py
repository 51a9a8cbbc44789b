"""States and questions for decider checkpoints, and the token ids that decider-ai 1.10.0 gives them.

`decider_ids.json` holds the ids. ``python -m tests.decisions.decider_cases`` has written it, with decider-ai
installed, by calling `Decider._system_one_items`. The tests need no decider-ai.
"""

from __future__ import annotations

import json
import string
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

IDS = Path(__file__).with_name("decider_ids.json")

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"neutralize_none": False},
    "early": {},
    "isolated": {"neutralize_none": False, "isolated_levels": True, "layout": "plain"},
    "chat": {"neutralize_none": False, "isolated_levels": True, "layout": "chat"},
}
"""Contents of `decider_config.json`."""
STATES: list[Any] = [
    "My order 7 arrived broken: (A) I want my money back.",
    "",
    {"from": "Zoë", "lines": [{"n": 1}, "two", *range(7)], "few": [1, None]},
]
QUESTIONS: dict[str, dict[str, Any]] = {
    "pair": {
        "type": "choice",
        "instructions": "Which team?",
        "criteria": {"billing": None, "returns": "goods"},
    },
    "ten": {"type": "choice", "instructions": "Which?", "criteria": dict.fromkeys(map(str, range(10)))},
    "eleven": {
        "type": "choice",
        "instructions": "Which?",
        "criteria": {f"o{n}": "x:" * n for n in range(11)},
    },
    "all": {"type": "choice", "instructions": "Which?", "criteria": dict.fromkeys(map(str, range(255)))},
    "none": {"type": "choice", "instructions": "Why?", "criteria": {"None of the above!": "a", " N/A": None}},
    "noul": {"type": "noul", "instructions": "Is it late?", "criteria": {"true": "after 8"}},
    "described": {"type": "noul", "criteria": {"false": "no question", "true": None}},
    "score": {"type": "score", "instructions": "How bad?", "criteria": ["calm", "2: angry", "very\nangry"]},
}


def tokenizer() -> PreTrainedTokenizerFast:
    """A BPE tokenizer of bytes, pairs of capital letters, and pairs that a wrong cut would join or part."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline, space = "Ċ", "Ġ"
    capitals = string.ascii_uppercase
    merges = [
        *[(newline, newline), (":", newline), (newline, "C"), (newline, "(")],
        *[(":", space), (space, "("), (")", space), ("e", "r"), ("1", "1")],
        *product(capitals, repeat=2),
    ]
    vocabulary = {piece: place for place, piece in enumerate([*alphabet, *map("".join, merges)])}
    backend = Tokenizer(BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<think>", "</think>"])
    found = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    found.chat_template = TEMPLATE
    return found


def main() -> None:
    from decider import prompt, prompt_fast, systemone  # type: ignore[import-not-found]
    from decider.infer import Decider  # type: ignore[import-not-found]

    model = tokenizer()
    found = {}
    for name, config in CONFIGS.items():
        chat = prompt.chat_for(model, config)
        package = SimpleNamespace(
            m=SimpleNamespace(tok=model),
            schema_first=False,
            isolated_levels=bool(config.get("isolated_levels", False)),
            neutralize_none=bool(config.get("neutralize_none", True)),
            chat=chat,
        )
        head = [] if chat is None else list(chat.head)
        states = [head + prompt_fast.context_ids(model, systemone.render_state(state)) for state in STATES]
        forms: list[list[list[int]]] = []
        for question in QUESTIONS.values():
            for state, ids in zip(STATES, states, strict=True):
                items = Decider._system_one_items(package, state, {"q": question})[2]
                assert all(item["ids"][: len(ids)] == ids for item in items)
                rest = [item["ids"][len(ids) :] for item in items]
                assert state is STATES[0] or forms[-1] == rest
                forms += [rest] if state is STATES[0] else []
        found[name] = {"states": states, "forms": forms}
    IDS.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
