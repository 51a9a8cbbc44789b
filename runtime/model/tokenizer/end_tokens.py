"""The tokens that end an output, for models whose own files name none.

Example: `eos_token_id` is null in config.json, and the chat template writes "<|im_end|>\n" after an
assistant's turn. The first token of that text is a special token, so it ends outputs. The tokenizer's
`eos_token` ends them too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ramify.errors import UnsupportedField
from ramify.runtime.model.shape.config import ModelShape
from ramify.runtime.model.tokenizer.chat_format import chat_format
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer

Shape = TypeVar("Shape", bound=ModelShape)

REMEDY = "Write the token's id as eos_token_id into generation_config.json beside the model's config.json."


def with_end_tokens(shape: Shape, folder: Path) -> tuple[Shape, str | None]:
    """(`shape` with end tokens in its vocabulary, note for the log). The end tokens are those of
    `end_tokens_of` if the model names none; the note, which says so, is None if the model names some.

    If none are found, outputs end by `max_tokens` and stop strings, and constraints are refused.

    folder : the folder of the tokenizer
    """
    own = tuple(token for token in shape.eos_token_ids if 0 <= token < shape.vocab_size)
    if own:
        return replace(shape, eos_token_ids=own), None
    found = end_tokens_of(folder, shape.vocab_size)
    shape = replace(shape, eos_token_ids=tuple(found))
    if not found:
        return shape, (
            "This model names no end token, and neither do its tokenizer and chat template: outputs end by "
            f"max_tokens and stop strings, and constraints are refused. {REMEDY}"
        )
    named = ", ".join(f"{token} ({text!r})" for token, text in found.items())
    return (
        shape,
        f"This model names no end token. Those of its tokenizer and chat template are taken: {named}.",
    )


def end_tokens_of(folder: Path, vocab_size: int) -> dict[int, str]:
    """Ids and texts of the tokenizer's end token, and of the special token after an assistant's turn."""
    tokenizer = load_tokenizer(folder)
    form = chat_format(tokenizer)
    closing = "" if form is None else form.suffix.get("assistant", "")
    ids = [tokenizer.eos_token_id, *tokenizer.encode(closing, add_special_tokens=False)[:1]]
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return {
        token: str(tokenizer.convert_ids_to_tokens(token))
        for token in ids
        if token is not None and token < vocab_size and token in special
    }


def no_end_token(field: str) -> UnsupportedField:
    """The refusal of a constraint, or of options that end in the end of a turn, with a model that has no end
    token."""
    return UnsupportedField(
        f"This model has no end token, so {field} cannot be honoured.",
        field=field,
        remedy=REMEDY,
    )
