"""The fields of Ollama's API."""

from __future__ import annotations

from ramify.runtime.server.tables.openai import FUNCTION, PART, TOOL, TOOL_CHOICES, TOOLS
from ramify.runtime.server.tables.rows import Endpoint, FieldTable, ignored, refused, taken

_MODEL = taken(
    "model",
    "the served model, `default`, or a LoRA adapter; with the tag `:latest` or without. Where a text is"
    " generated or embedded, without it the first model",
)
_OLD_NAME = taken("name", "the same as `model`, for older clients")
_KEEP_ALIVE = taken(
    "keep_alive",
    "the time for which the model stays loaded ([several models](#several-models)). No effect on a server of"
    " one model that is always loaded, which refuses 0 without a prompt",
)
_RAW = "With raw or a suffix the prompt is sent without the chat template."
_IMAGES = "This server reads and writes text alone."

_ANSWER = (
    _MODEL,
    taken("stream", "true by default"),
    taken("options", "the object listed below `/api/chat`"),
    taken("format", '"json" or a JSON schema'),
    taken("logprobs top_logprobs", "of each line"),
    _KEEP_ALIVE,
    refused("template", "The model's own chat template is used."),
    refused("images", _IMAGES),
)
_THINK_WORDS = 'false, true, "low", "medium" or "high". A model that can think does so unless it is false'

MESSAGE = FieldTable(
    "messages[]",
    taken("role content"),
    taken("tool_calls", elsewhere="Only messages of the role assistant have calls."),
    taken("thinking", elsewhere="Only messages of the role assistant have it."),
    taken("tool_name tool_call_id", elsewhere="Only messages of the role tool have it."),
    ignored("name"),
    refused("images", _IMAGES),
)
"""``name`` is taken in the results of tools."""
CALL = FieldTable("messages[].tool_calls[]", taken("id type function"), ignored("index"))
CALL_FUNCTION = FieldTable("messages[].tool_calls[].function", taken("name arguments"), ignored("index"))

_SAMPLING = "temperature top_k top_p min_p stop presence_penalty frequency_penalty"
_LOADING = "numa num_batch num_gpu main_gpu low_vram f16_kv logits_all use_mmap use_mlock num_thread"
_SWITCHED_OFF = {
    "mirostat": (0,),
    "tfs_z": (1,),
    "typical_p": (1,),
    "vocab_only": (False,),
    "embedding_only": (False,),
}
"""Option → the value that switches it off."""

OPTIONS = FieldTable(
    "options",
    taken(_SAMPLING, "as for chat completions"),
    taken("repeat_penalty repeat_last_n"),
    taken("seed num_predict"),
    taken("num_ctx"),
    ignored("num_keep penalize_newline mirostat_tau mirostat_eta"),
    ignored(_LOADING),
    *(ignored(name, allowed=allowed) for name, allowed in _SWITCHED_OFF.items()),
)
EMBED_OPTIONS = FieldTable(
    "options",
    taken("num_ctx"),
    ignored(_SAMPLING),
    ignored("repeat_penalty repeat_last_n seed num_predict"),
    ignored("num_keep penalize_newline mirostat_tau mirostat_eta"),
    ignored(_LOADING),
    ignored(" ".join(_SWITCHED_OFF)),
)

_REQUIRED = {"model": "default"}

CHAT = Endpoint(
    title="/api/chat",
    path="/api/chat",
    body=FieldTable(
        "",
        taken(
            "messages",
            "text, calls and results of tools. A result that names no call belongs to the first call that has"
            " none",
        ),
        TOOLS,
        taken("think", _THINK_WORDS),
        *_ANSWER,
        refused("system", "Write a message of the role system."),
        refused("prompt", "Use messages, or /api/generate."),
    ),
    inner=(MESSAGE, PART, CALL, CALL_FUNCTION, TOOL, FUNCTION, *TOOL_CHOICES, OPTIONS),
    required=_REQUIRED,
    limit="options.num_predict",
)
GENERATE = Endpoint(
    title="/api/generate",
    path="/api/generate",
    body=FieldTable(
        "",
        taken("prompt", "a chat of one turn"),
        taken("raw", "true sends the prompt without the chat template, `system` and `think`"),
        taken("suffix", "as for text completions: the model fills in the middle, without the chat template"),
        taken("system", "the system turn before it", elsewhere=_RAW),
        taken("think", "as for `/api/chat`", elsewhere=_RAW),
        *_ANSWER,
        refused("context", "Use /api/chat, and send the conversation as messages."),
        refused("tools messages", "Use /api/chat."),
        refused("width height steps", _IMAGES),
    ),
    inner=(OPTIONS,),
    required=_REQUIRED,
    limit="options.num_predict",
)
_EMBEDDING = (
    _MODEL,
    taken("options", "of these only `num_ctx` is read"),
    taken("pooling", '`"last"` or `"mean"`, instead of the model\'s own'),
    _KEEP_ALIVE,
    ignored("truncate", "a text that is too long is refused"),
)
EMBED = Endpoint(
    title="/api/embed",
    path="/api/embed",
    body=FieldTable(
        "",
        taken("input", "a text, or a list of texts"),
        taken("dimensions", "keeps the first dimensions, before the division by the length"),
        *_EMBEDDING,
    ),
    inner=(EMBED_OPTIONS,),
    required=_REQUIRED | {"input": "x"},
)
EMBEDDINGS = Endpoint(
    title="/api/embeddings",
    path="/api/embeddings",
    body=FieldTable("", taken("prompt", "one text. Its embedding is not normalised"), *_EMBEDDING),
    inner=(EMBED_OPTIONS,),
    required=_REQUIRED | {"prompt": "x"},
)
SHOW = Endpoint(
    title="/api/show",
    path="/api/show",
    body=FieldTable("", _MODEL, _OLD_NAME, ignored("verbose"), refused("system template options")),
    required=_REQUIRED,
)
PULL = Endpoint(
    title="/api/pull",
    path="/api/pull",
    body=FieldTable("", _MODEL, _OLD_NAME, taken("stream"), ignored("insecure")),
    required=_REQUIRED,
)
ENDPOINTS = (CHAT, GENERATE, EMBED, EMBEDDINGS, SHOW, PULL)
