"""The fields of SGLang's native API."""

from __future__ import annotations

from ramify.runtime.server.tables.rows import Endpoint, FieldTable, ignored, refused, taken
from ramify.sampling_options import DEFAULT_MAX_TOKENS

SAMPLING_PARAMS = FieldTable(
    "sampling_params",
    taken(
        "n max_new_tokens min_new_tokens temperature top_p top_k min_p presence_penalty frequency_penalty"
        " repetition_penalty logit_bias sampling_seed stop stop_token_ids ignore_eos skip_special_tokens"
        " token_healing regex ebnf json_schema structural_tag"
    ),
    # Fast tokenizers, the only ones that are loaded, put no spaces there.
    ignored("spaces_between_special_tokens"),
    refused("stop_regex no_stop_trim beam_width stream_interval custom_params watermark"),
)
PROGRAM = FieldTable(
    "program",
    taken(
        "program name lease_s path next_use branch forks ended parts calls_left limits session pinned client"
        " max_pinned_share"
    ),
)
CONSTRAINT = FieldTable("constraint", taken("kind source whitespace any_order strict definitions"))

GENERATE = Endpoint(
    title="/generate",
    path="/generate",
    body=FieldTable(
        "",
        taken(
            "text input_ids prompt_segments",
            "one of them: a text, token ids, or text and token ids mixed; or lists of these",
        ),
        taken(
            "sampling_params",
            "sampling options and constraints as SGLang spells them; a list gives each prompt its own",
        ),
        taken(
            "stream rid return_logprob logprob_start_len top_logprobs_num return_text_in_logprobs", "SGLang's"
        ),
        taken(
            "constraint",
            "any kind of constraint: {kind, source, whitespace, any_order, strict, definitions}, where the"
            " source of `json_schema` is the JSON text of the schema as a string",
        ),
        taken("choices", "texts that are scored behind the prompt"),
        taken(
            "preambles program cache_scope",
            "free text before the constraint, each {end, start, max_tokens, optional, apart, counted}; the"
            " program that asks; the cache scope",
        ),
        taken("priority", "of all prompts of the request, as for OpenAI's endpoints"),
        taken("model", "the model, if the server has several, or an adapter; without it the first model"),
        taken(
            "lora_path",
            "the name of a loaded [LoRA adapter](lora.md); a list gives each prompt its own",
        ),
        refused("image_data video_data audio_data input_embeds modalities"),
        refused("session_id session_params", "Continue from token ids with prompt_segments."),
        refused("token_ids_logprob return_hidden_states return_prompt_token_ids return_entropy"),
        refused("custom_logit_processor background"),
        refused("extra_key", "Use cache_scope."),
        refused("require_reasoning"),
    ),
    inner=(SAMPLING_PARAMS, PROGRAM, CONSTRAINT),
    required={"text": "x"},
    limit="sampling_params.max_new_tokens",
    default_tokens=DEFAULT_MAX_TOKENS,
)
LOAD_LORA = Endpoint(
    title="/load_lora_adapter",
    path="/load_lora_adapter",
    body=FieldTable(
        "",
        taken("lora_name lora_path"),
        refused("load_inplace", "Unload it first."),
        refused("pinned", "Adapters stay loaded."),
    ),
    required={"lora_name": "x", "lora_path": "x"},
)
UNLOAD_LORA = Endpoint(
    title="/unload_lora_adapter",
    path="/unload_lora_adapter",
    body=FieldTable("", taken("lora_name"), ignored("lora_int_id", "vLLM's own number of the adapter")),
    required={"lora_name": "x"},
)
ABORT = Endpoint(
    title="/abort_request",
    path="/abort_request",
    body=FieldTable("", taken("rid abort_all")),
    required={"rid": "x"},
)
AWAIT_TOOLS = Endpoint(
    title="/await_tools",
    path="/await_tools",
    body=FieldTable("", taken("program branch tools")),
    required={"program": "x", "tools": ["x"]},
)
END_PROGRAM = Endpoint(
    title="/end_program",
    path="/end_program",
    body=FieldTable("", taken("program cache_salt")),
    required={"program": "x"},
)
ENDPOINTS = (GENERATE, LOAD_LORA, UNLOAD_LORA, ABORT, AWAIT_TOOLS, END_PROGRAM)
