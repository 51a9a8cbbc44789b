"""The served model as clients see it: its limits, its tokens, and its chat template as pieces."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ramify.questions import Calibration, LayoutName


class ToolPieces(msgspec.Struct, frozen=True, kw_only=True):
    """The pieces of text with which the chat template writes tools and results, in a conversation that begins
    with a system turn."""

    start: str
    """Text before the system content if there are tools."""
    place: Literal["system", "user"]
    """The place of the tools: at the end of the system content, or at the beginning of the user turn after
    it."""
    before: str
    between: str
    after: str
    """`before`, `between` and `after`: the texts before, between and after the tools. Each tool is JSON."""
    indent: int | None
    """Indent of the JSON of a tool, in spaces; None for JSON in one line."""
    quoted: bool
    """Whether a result is written as a JSON string. Its quotes belong to the pieces of the tool turn."""


class ThinkingFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The marks of a model's thoughts, and their treatment by its chat template.

    `ChatFormat.prefix`, with which an assistant turn begins, ends with `default` (may be ""). `default` is
    replaced by `on` if the model is to think, by `off` if it is not to think, and by `past` in an earlier
    turn without thoughts.
    """

    start: str = "<think>\n"
    """The text that begins the thoughts. `on` ends with it."""
    end: str = "</think>"
    gap: str = "\n\n"
    """The text between `end` and the answer."""
    default: str = ""
    on: str = "<think>\n"
    off: str = ""
    past: str = ""
    channels: bool = False
    """Whether thoughts and answer are messages of one turn, each with the name of its channel, as gpt-oss
    writes them. `default` is then the text at the end of the prefix that begins a message in the channel of
    answers.
    """
    kept: Literal["turn", "user", "always"] = "turn"
    """The time for which thoughts stay in the prompt. "turn": until the end of their turn. "user": until the
    next user turn. "always": for ever."""


class ChatFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The model's chat template as pieces that can be appended one turn at a time.

    A conversation is ``prefix[">system"] + content + suffix["system"] + prefix["system>user"] + …``:
    `prefix` is keyed by "previous role>role" (empty previous role at the start, where a template may
    insert a default system turn), `suffix` by role.
    """

    prefix: dict[str, str]
    suffix: dict[str, str]
    exact: bool
    """Whether the pieces gave the same text as the Jinja template for every probe conversation."""
    tool_format: str = "generic"
    """Name of the format in which the template writes tool calls (`ramify.tool_calls.formats`)."""
    tools: ToolPieces | None = None
    """The pieces for tools and results; None if appending them one by one does not give the template's
    text."""
    difference: str = ""
    """If `exact` is False: the first probe conversation that differs, as rendered by the pieces and by the
    template."""
    variables: tuple[str, ...] = ()
    """Variables that the template reads besides messages, tools, special tokens and add_generation_prompt."""
    thinking: ThinkingFormat | None = None
    """The marks of thoughts; None if the template gives no sign that the model thinks."""
    source: str = ""
    """The template itself, in Jinja."""


class KvRoom(msgspec.Struct, frozen=True, kw_only=True):
    """The KV pages of one engine, in tokens, and the texts that say so."""

    tokens: int
    """Tokens of all requests and of the prefix tree together."""
    kept_tokens: int
    """Tokens whose memory is never returned to the system once it was used."""
    bytes_per_token: int
    bound: Literal["option", "context", "memory"]
    """The reason why there is no more room: an option, the model's context, or free memory at the start."""
    text: str
    """The line for the start of a server: the room, its bound, and options that hold more."""
    remedy: str
    """The clause of an error that advises how longer prompts fit."""


MORE_ROOM = "give the engine a larger context_length or kv_memory_gb"
"""`KvRoom.remedy` where the room is not known."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The served model."""

    name: str
    path: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    device: str
    chat_format: ChatFormat | None
    """The chat template as pieces; None if the model has no chat template."""
    special_tokens: dict[str, str] = {}
    """Special tokens of the tokenizer by their names in a tokenizer_config.json, such as "eos_token"."""
    model_impl: str = "native"
    """The implementation of the model: native or transformers."""
    fingerprint: str = ""
    """Text that changes with anything that may change an answer: weights, tokenizer, number formats. Empty if
    not known."""
    digest: str = ""
    """Digest of the weights, the tokenizer and the options that change the model: the same on all machines
    that have the same files. Empty if not known."""
    max_running: int = 0
    """Most requests in a batch of a replica. `chunk_tokens`: most prompt tokens in a step of a replica."""
    chunk_tokens: int = 0
    page_size: int = 0
    """Tokens of a KV page."""
    sampling_defaults: dict[str, Any] = {}
    """Sampling options that the model's files recommend, by name."""
    pooling: str = "last"
    """The pooling for embeddings that the model's folder names: a `Pooling`, or if that pooling is not
    supported, its name."""
    trained_layout: str = ""
    """Name and version of the layout of questions that the checkpoint was trained with, such as "decider-1";
    "unsupported" if it has one that is refused by name, empty if it has none."""
    kv_room: KvRoom | None = None
    """The KV pages of the engine, of each replica; None if not known."""
    calibration: Calibration | None = None
    """Temperatures for the probabilities of decisions; None for none."""

    def trained_layout_for(self, layout: LayoutName) -> str:
        """Name of the trained layout that `Decide.layout` stands for; empty for a layout of other models."""
        return self.trained_layout if layout in ("auto", "trained") else ""
