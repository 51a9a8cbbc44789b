"""Whether one model can draft for another. Loads no weights."""

from __future__ import annotations

from pathlib import Path

from ramify.errors import UnsupportedField
from ramify.runtime.config import EngineConfig
from ramify.runtime.model.shape.config import ModelShape
from ramify.runtime.model.shape.context import with_context
from ramify.runtime.model.tokenizer.tokenizer import load_backend, tokenizer_file


def check_draft(
    config: EngineConfig, shape: ModelShape, draft: ModelShape, tokenizer: Path, draft_tokenizer: Path
) -> None:
    """Raises `UnsupportedField` where the draft model of shape `draft` cannot draft for the model of `shape`.

    tokenizer, draft_tokenizer : the folders of their tokenizers
    """
    name = f"draft_model {config.draft_model!r}"
    if draft.states is not None:
        raise _refused(
            f"{name} has linear attention layers: their states cannot go back behind draft tokens that are "
            "not accepted."
        )
    context_length = with_context(shape, config.context_length).context_length
    if draft.context_length < context_length:
        raise _refused(
            f"{name} has a context of {draft.context_length} tokens, and the engine one of {context_length}.",
            f"Give the engine a context_length of {draft.context_length}, or choose another draft model.",
        )
    differing = _difference(tokenizer, draft_tokenizer)
    if differing is not None:
        token, ours, other = differing
        raise _refused(
            f"{name} has another tokenizer: its token {token} is {other!r}, and the model's is {ours!r}."
        )


def _difference(tokenizer: Path, draft_tokenizer: Path) -> tuple[int, str | None, str | None] | None:
    """The first token that differs, and its two spellings, None where there is none.

    Tokens behind the last one of the shorter vocabulary do not count: there they are padding.
    """
    first, second = tokenizer_file(tokenizer), tokenizer_file(draft_tokenizer)
    if first.read_bytes() == second.read_bytes():
        return None
    ours, others = (
        {token: text for text, token in load_backend(folder).get_vocab(with_added_tokens=True).items()}
        for folder in (tokenizer, draft_tokenizer)
    )
    for token in range(1 + min(max(ours), max(others))):
        if ours.get(token) != others.get(token):
            return token, ours.get(token), others.get(token)
    return None


def _refused(
    message: str, remedy: str = "Choose a smaller model of the same family, with its tokenizer."
) -> UnsupportedField:
    return UnsupportedField(message, field="draft_model", remedy=remedy)
