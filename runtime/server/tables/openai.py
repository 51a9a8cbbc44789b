"""The fields of chat completions, completions, embeddings and tokenization."""

from __future__ import annotations

from ramify.runtime.server.tables.rows import Endpoint, FieldTable, ignored, refused, taken

REQUEST = FieldTable(
    "",
    taken(
        "model",
        "the served model, `default`, or a [LoRA adapter](lora.md) as `name` or `model:name`; without it the"
        " first model",
    ),
    taken("stream stream_options", "an error in the middle of a stream is its last event"),
    taken(
        "priority",
        "from -100 to 100, higher goes first, as in SGLang; vLLM's go the other way"
        " ([scheduling.md](scheduling.md))",
    ),
    taken(
        "service_tier",
        "where there is no `priority`: `flex` stands for -1, `priority` for 1, `auto` and `default` for 0;"
        " the answer names the tier",
    ),
    taken("cache_salt", "the cache scope: requests of different scopes share no prefix"),
    taken("user safety_identifier", "written to the log"),
    taken(
        "prompt_cache_key prompt_cache_retention prompt_cache_options",
        "the program, and its lease ([programs of other clients](#programs-of-other-clients)); equal prefixes"
        " share one cache, whatever the key. `prompt_cache_retention` is `in_memory` or `24h`; a time such as"
        " `30m` is for `prompt_cache_options.ttl`",
    ),
    refused("moderation"),
    refused("guided_decoding_backend", "It is an option of the server: ramify serve --grammar-backend."),
    refused("guided_whitespace_pattern", "Use a json_schema format and its whitespace."),
    refused("any_order", "Write it beside the schema, in response_format.json_schema or text.format."),
    refused("lora_path", 'Name the adapter in model: its name, or "model:name".'),
)
"""Fields of every endpoint that runs the model."""

SAMPLING = FieldTable(
    "",
    taken(
        "temperature top_p presence_penalty frequency_penalty logit_bias seed stop",
        "OpenAI's, on `/v1/responses` as well. `temperature` may be up to 100",
    ),
    taken(
        "top_k min_p repetition_penalty min_tokens stop_token_ids ignore_eos skip_special_tokens",
        "as vLLM and SGLang have them",
    ),
    taken("token_healing", "false keeps the tokens at the end of a text prompt as they are"),
    taken(
        "regex ebnf json_schema structural_tag guided_json guided_regex guided_choice guided_grammar"
        " structured_outputs",
        "a constraint, as SGLang and vLLM spell it; one a request"
        " ([structured-output.md](structured-output.md))",
    ),
)
"""Fields of every endpoint of OpenAI's that generates."""

TIMINGS = taken(
    "timings_per_token",
    "each event of a stream has `timings`, as llama.cpp gives them. The whole answer and the last event have"
    " them in any case, if there is one prompt and one choice",
)
OTHER_SERVERS = FieldTable(
    "",
    taken("repeat_penalty", "the same as `repetition_penalty`, as llama.cpp and Ollama spell it"),
    taken("include_stop_str_in_output", "true leaves the stop string at the end of the text"),
    ignored("session_id", "of agents, about themselves"),
    ignored("provider usage", "OpenRouter's: there is one provider, and the usage is always told"),
    ignored("cache_prompt id_slot", "llama.cpp's: every prefix is cached, and there are no slots"),
    taken(
        "num_ctx",
        "Ollama's: more than the server's context length is refused, less has no effect",
    ),
    *(
        ignored(names, f"a sampler that is not here: must be {off}, which is off", allowed=(off,))
        for names, off in (("typical_p tfs_z", 1), ("mirostat dynatemp_range dry_multiplier", 0))
    ),
    ignored("xtc_probability top_a", "likewise 0", allowed=(0,)),
    ignored("top_n_sigma", "likewise -1", allowed=(-1,)),
    ignored(
        "mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold dry_base dry_allowed_length"
        " dry_penalty_last_n dry_sequence_breakers",
        "options of these samplers",
    ),
    ignored("repeat_last_n", "must be -1: penalties look at all tokens", allowed=(-1,)),
    refused("stop_regex", "A regex as constraint ends by itself."),
)
"""Fields of other servers on the same endpoints."""

STREAM_OPTIONS = FieldTable(
    "stream_options",
    taken("include_usage continuous_usage_stats"),
    ignored("include_obfuscation reasoning_summary_delivery"),
)
PROMPT_CACHE_OPTIONS = FieldTable(
    "prompt_cache_options",
    taken("ttl"),
    ignored("mode", allowed=("implicit", "explicit")),
    ignored("comparison_response_id"),
    refused("prewarm", "Send the prompt with max_tokens: 1."),
)
STRUCTURED_OUTPUTS = FieldTable(
    "structured_outputs",
    taken("json regex choice grammar structural_tag json_object disable_any_whitespace"),
    refused("whitespace_pattern", "Use response_format with a json_schema and its whitespace."),
    refused("disable_additional_properties", "Write additionalProperties: false into the schema."),
    refused("disable_fallback backend"),
)

REASONING = taken(
    "reasoning",
    "{enabled, effort, max_tokens, exclude, start, end} ([structured-output.md](structured-output.md))",
)
TEMPLATE = taken(
    "reasoning_effort chat_template_kwargs",
    "for the chat template, if it reads them. Efforts and switches work where the model thinks, and have no"
    " effect where it does not",
)
OTHER_REASONING = taken(
    "enable_thinking thinking_budget thinking_token_budget separate_reasoning include_reasoning"
    " stream_reasoning",
    "reasoning as other servers spell it",
)
_SUMMARIES = ("auto", "concise", "detailed")
REASONING_OBJECT = FieldTable(
    "reasoning",
    taken("enabled effort max_tokens exclude start end"),
    ignored(
        "summary generate_summary",
        "the summary is empty, as the reasoning itself is answered",
        allowed=_SUMMARIES,
    ),
    ignored(
        "context",
        "the chat template shows the reasoning of earlier turns, or leaves it out",
        allowed=("auto", "current_turn", "all_turns"),
    ),
    ignored("mode", allowed=("standard",)),
)
TOOLS = taken(
    "tools tool_choice parallel_tool_calls",
    "at most 128: functions, and custom tools as for `/v1/responses`. Arguments satisfy their schema but for"
    " keywords that cannot be enforced, which are left out"
    " and told unless `strict` is true ([structured-output.md](structured-output.md#tools)). A tool without a"
    " `type` is a function",
)
OTHER_TOOL = (
    ignored("defer_loading", "every tool is in the prompt"),
    ignored("output_schema", "chat templates have no place for it"),
    ignored("cache_control"),
    refused("allowed_callers async"),
)
FUNCTION = FieldTable("tools[].function", taken("name description parameters strict"), *OTHER_TOOL)
CUSTOM = FieldTable("tools[].custom", taken("name description format"), *OTHER_TOOL)
CUSTOM_FORMAT = FieldTable("tools[].custom.format", taken("type grammar"))
CUSTOM_GRAMMAR = FieldTable("tools[].custom.format.grammar", taken("syntax definition"))
TOOL = FieldTable("tools[]", taken("type function custom"), ignored("cache_control"))
MESSAGE = FieldTable(
    "messages[]",
    taken("role content"),
    taken("tool_calls", elsewhere="Only messages of the role assistant have calls."),
    taken("tool_call_id", elsewhere="Only messages of the role tool have it."),
    taken("reasoning_content reasoning", elsewhere="Only messages of the role assistant have reasoning."),
    ignored("name id"),
    ignored("cache_control provider_specific_fields", "as LiteLLM writes them"),
    refused("function_call", "Use tool_calls."),
    refused("refusal audio annotations"),
)
"""``name`` is taken in the results of tools."""
PART = FieldTable(
    "messages[].content[]",
    taken("type text"),
    ignored("prompt_cache_breakpoint cache_control", "every prefix is cached"),
    refused("annotations"),
)
CALL = FieldTable(
    "messages[].tool_calls[]", taken("id type function custom"), ignored("index provider_specific_fields")
)
CALL_FUNCTION = FieldTable(
    "messages[].tool_calls[].function", taken("name arguments"), ignored("provider_specific_fields")
)
CALL_CUSTOM = FieldTable(
    "messages[].tool_calls[].custom", taken("name input"), ignored("provider_specific_fields")
)
TOOL_CHOICE = FieldTable("tool_choice", taken("type function custom allowed_tools"))
TOOL_CHOICE_FUNCTION = FieldTable("tool_choice.function", taken("name"))
TOOL_CHOICE_CUSTOM = FieldTable("tool_choice.custom", taken("name"))
ALLOWED = FieldTable("tool_choice.allowed_tools", taken("mode tools"))
ALLOWED_TOOL = FieldTable("tool_choice.allowed_tools.tools[]", taken("type function custom"))
ALLOWED_FUNCTION = FieldTable("tool_choice.allowed_tools.tools[].function", taken("name"))
ALLOWED_CUSTOM = FieldTable("tool_choice.allowed_tools.tools[].custom", taken("name"))
FORMAT = FieldTable(
    "response_format",
    taken("type json_schema whitespace regex pattern ebnf lark grammar choice format structures triggers"),
)
SCHEMA = FieldTable(
    "response_format.json_schema",
    taken("name schema strict whitespace any_order definitions"),
    ignored("description", "meant for the model, which does not see the schema either"),
)
TOOL_CHOICES = (
    TOOL_CHOICE,
    TOOL_CHOICE_FUNCTION,
    TOOL_CHOICE_CUSTOM,
    ALLOWED,
    ALLOWED_TOOL,
    ALLOWED_FUNCTION,
    ALLOWED_CUSTOM,
)
CHAT_OBJECTS = (
    *(MESSAGE, PART, CALL, CALL_FUNCTION, CALL_CUSTOM),
    *(TOOL, FUNCTION, CUSTOM, CUSTOM_FORMAT, CUSTOM_GRAMMAR),
    *TOOL_CHOICES,
)

_MODEL = {"model": "default"}
_MESSAGES = {"messages": [{"role": "user", "content": "x"}]}

CHAT = Endpoint(
    title="Chat completions",
    path="/v1/chat/completions",
    shared=(REQUEST, SAMPLING, OTHER_SERVERS),
    body=FieldTable(
        "",
        taken(
            "messages",
            "text, calls and results of tools, earlier reasoning as `reasoning_content`; no images, files or"
            " audio",
        ),
        TOOLS,
        taken(
            "response_format",
            "OpenAI's types, and `regex`, `ebnf`, `lark`, `choice`, `structural_tag`",
        ),
        taken(
            "max_tokens max_completion_tokens n logprobs top_logprobs",
            "a limit is at least 1, and is cut to the room in the context; left out or -1, the answer may"
            " fill it",
        ),
        REASONING,
        TEMPLATE,
        OTHER_REASONING,
        TIMINGS,
        ignored("metadata client_metadata"),
        ignored("store", "nothing is stored, so it must be false", allowed=(False,)),
        ignored("modalities", 'must be `["text"]`', allowed=(["text"],)),
        ignored("verbosity", "ask for it in a message"),
        ignored("prediction", "draft tokens are taken from the prompt"),
        taken(
            "add_generation_prompt continue_final_message",
            "as in vLLM: false ends the prompt with the last message; true continues the last message, an"
            " assistant's",
        ),
        refused("functions", "Use tools."),
        refused("function_call", "Use tool_choice."),
        refused("audio web_search_options chat_template echo"),
    ),
    inner=(
        *CHAT_OBJECTS,
        FORMAT,
        SCHEMA,
        REASONING_OBJECT,
        STREAM_OPTIONS,
        PROMPT_CACHE_OPTIONS,
        STRUCTURED_OUTPUTS,
    ),
    required=_MODEL | _MESSAGES,
    limit="max_tokens",
)
COMPLETION = Endpoint(
    title="Text completions",
    path="/v1/completions",
    shared=(REQUEST, SAMPLING, OTHER_SERVERS),
    body=FieldTable(
        "",
        taken("prompt", "a text, token ids, or a list of either"),
        taken("response_format", "as for chat completions"),
        taken(
            "max_tokens n logprobs echo best_of",
            "16 tokens by default, -1 for as many as fit; `best_of` must be 1. With `echo` a prompt of token"
            " ids comes back as text",
        ),
        ignored("metadata client_metadata"),
        ignored("store", "nothing is stored, so it must be false", allowed=(False,)),
        taken(
            "suffix",
            "the model fills in the middle between `prompt`, a text, and `suffix`; a model without tokens for"
            " that is refused",
        ),
        TIMINGS,
        refused("tools", "Use /v1/chat/completions."),
    ),
    inner=(FORMAT, SCHEMA, STREAM_OPTIONS, PROMPT_CACHE_OPTIONS, STRUCTURED_OUTPUTS),
    required=_MODEL | {"prompt": "x"},
    limit="max_tokens",
    default_tokens=16,  # OpenAI's API reference
)
EMBEDDING = Endpoint(
    title="Embeddings",
    path="/v1/embeddings",
    shared=(REQUEST,),
    body=FieldTable(
        "",
        taken("input", "a text, a list of texts, token ids, or a list of such lists"),
        taken("encoding_format", '`"float"`, or `"base64"` of little-endian float32'),
        taken("dimensions", "keeps the first dimensions, before the division by the length"),
        taken("pooling", '`"last"` or `"mean"`, instead of the model\'s own'),
        taken("normalize", "default true: embeddings have length 1"),
        refused("messages", "Give the text as input."),
    ),
    inner=(STREAM_OPTIONS, PROMPT_CACHE_OPTIONS),
    required=_MODEL | {"input": "x"},
)
TOKENIZE = Endpoint(
    title="/tokenize",
    path="/tokenize",
    body=FieldTable(
        "",
        taken("model", "as for chat completions"),
        taken("prompt", "a text, or a list of texts, which is answered by lists"),
        taken(
            "messages tools tool_choice parallel_tool_calls reasoning reasoning_effort chat_template_kwargs"
            " enable_thinking thinking_budget thinking_token_budget separate_reasoning include_reasoning"
            " stream_reasoning",
            "instead: a chat, as chat completions take it",
        ),
        taken("add_generation_prompt continue_final_message", "as for chat completions"),
        taken(
            "add_special_tokens", "true by default for a prompt, false for a chat, whose template writes them"
        ),
        taken("return_token_strs", "adds the entries of the vocabulary"),
    ),
    inner=(*CHAT_OBJECTS, REASONING_OBJECT),
    required=_MODEL | _MESSAGES | {"prompt": "x"},
)
DETOKENIZE = Endpoint(
    title="/detokenize",
    path="/detokenize",
    body=FieldTable(
        "",
        taken("model", "as for chat completions"),
        taken("tokens", "ids, or a list of such lists, which is answered by lists"),
        taken(
            "skip_special_tokens",
            "true by default. `prompt` has the text of all tokens, as vLLM answers; `text` that without"
            " special tokens, as SGLang does",
        ),
    ),
    required=_MODEL | {"tokens": [0]},
)
ENDPOINTS = (CHAT, COMPLETION, EMBEDDING, TOKENIZE, DETOKENIZE)
