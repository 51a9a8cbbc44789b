"""The fields of llama.cpp's ``/infill``."""

from __future__ import annotations

from ramify.runtime.server.tables.rows import Endpoint, FieldTable, ignored, taken

INPUT_EXTRA = FieldTable("input_extra[]", taken("filename text"), ignored("time"))
INFILL = Endpoint(
    title="/infill",
    path="/infill",
    body=FieldTable(
        "",
        taken("input_prefix input_suffix", "the text before and behind the middle"),
        taken("prompt", "text behind `input_prefix`: the beginning of the line"),
        taken("input_extra", "[{filename, text}]: other files, which come first"),
        taken("n_predict", "-1, the default: as many as fit into the context; 0 only caches the prompt"),
        taken("temperature top_k top_p min_p presence_penalty frequency_penalty stop ignore_eos"),
        taken("repeat_penalty", "looks at all tokens"),
        taken("seed", "-1 means none"),
        taken("stream", "events without a `[DONE]`, as llama.cpp sends them"),
        taken("timings_per_token", "each event has `timings`"),
        taken("response_fields", 'keeps these fields of the answer, such as `"timings/prompt_ms"`'),
        taken("model", "optional"),
        ignored(
            "samplers",
            "only the list that llama.vim sends; its sampler `infill` is not applied",
            allowed=(["top_k", "top_p", "infill"],),
        ),
        ignored(
            "n_indent t_max_predict_ms t_max_prompt_ms",
            "hints of the editor: the answer may be longer",
        ),
        ignored("id_slot cache_prompt n_cache_reuse n_keep", "every prefix is cached"),
        ignored("n_probs", "0, for no log-probabilities", allowed=(0,)),
    ),
    inner=(INPUT_EXTRA,),
    required={"input_prefix": "x", "input_suffix": "y"},
    limit="n_predict",
)
ENDPOINTS = (INFILL,)
