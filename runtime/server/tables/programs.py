"""The fields of compiled programs."""

from __future__ import annotations

from ramify.runtime.server.tables.rows import Endpoint, FieldTable, taken
from ramify.sampling_options import DEFAULT_MAX_TOKENS

PROGRAMS = Endpoint(
    title="/v1/programs",
    path="/v1/programs",
    body=FieldTable(
        "",
        taken("graph", "the program, as `compile` writes it"),
        taken("arguments rows", "the arguments of one run, or of several"),
        taken("sampling_params", "options of steps that set none"),
        taken("cache_scope priority", "as for `/generate`"),
        taken("lora", "the adapter of steps that set none"),
        taken(
            "model",
            "the model of steps that name none, if the server has several; without it the first one",
        ),
        taken("timeout max_total_tokens max_calls", "limits of each run"),
        taken("stream events id", "server-sent events, which of them, and the client's id of the run"),
    ),
    required={"graph": {"nodes": []}},
    limit="sampling_params.max_tokens",
    default_tokens=DEFAULT_MAX_TOKENS,
)
RESULTS = Endpoint(
    title="/v1/programs/{id}/results",
    path="/v1/programs/{id}/results",
    body=FieldTable("", taken("tools row results")),
    required={"tools": "x", "results": []},
)
ENDPOINTS = (PROGRAMS,)
"""`RESULTS` needs a running program, so it has no sample body."""
