"""The draft model or draft head of an engine, and the refusal of one that cannot draft for its model."""

from __future__ import annotations

from pathlib import Path

from ramify.errors import UnsupportedField
from ramify.runtime.config import EngineConfig
from ramify.runtime.model.checkpoint import ModelFiles, is_eagle3, tensor_names
from ramify.runtime.model.loading.load import read_shape
from ramify.runtime.model.shape.config import ModelShape
from ramify.runtime.model.shape.context import with_context
from ramify.runtime.model.shape.heads import eagle3_head, own_head
from ramify.runtime.model.tokenizer.tokenizer import load_backend, tokenizer_file


def speculates(config: EngineConfig, device: str) -> bool:
    """True if an engine of `config` speculates: by default on the CPU and with a draft model.

    device : "cpu" or "cuda"
    """
    if config.speculation is not None:
        return config.speculation
    return device == "cpu" or config.draft_model is not None


def read_draft(
    config: EngineConfig, shape: ModelShape, files: ModelFiles, draft: ModelFiles | None
) -> ModelShape | None:
    """The shape of the draft model or EAGLE-3 head in `draft`; without `draft`, of the head for multi-token
    prediction in the model's own checkpoint, unless `config` rules out its use. None if there is none. In
    `config`, `speculates` is filled in.

    shape : the shape of the main model, which is in `files`

    Raises `UnsupportedField` if `draft` cannot draft for the main model.
    """
    if draft is None:
        unused = not config.speculation or config.tensor_parallel > 1 or config.load_format == "dummy"
        if unused or not files.weights.is_dir():
            return None
        return own_head(shape, lambda: tensor_names(files.weights))
    if is_eagle3(draft.weights):
        return eagle3_head(draft.weights, config.draft_model or draft.name, shape)
    found = read_shape(draft.weights, rope_scaling=config.rope_scaling)
    check_draft(config, shape, found, files.tokenizer, draft.tokenizer)
    return found


def check_draft(
    config: EngineConfig, shape: ModelShape, draft: ModelShape, tokenizer: Path, draft_tokenizer: Path
) -> None:
    """Raise `UnsupportedField` if a draft model of shape `draft` cannot draft for the main model, of shape
    `shape`.

    tokenizer, draft_tokenizer : the folders of the tokenizers of the main model and of the draft model
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
    """The first token id with different spellings in the two tokenizers, and both spellings; None if all are
    equal.

    Ids beyond the end of the smaller vocabulary do not count: they are padding in that vocabulary. The
    spelling of an id that a tokenizer does not have is None.
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
