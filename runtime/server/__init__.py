"""The HTTP server: one folder for each API dialect, above the modules that the dialects share.

- `service`: the state that all endpoints share. They get the chunks of generations from `Service.generate`.
- `metrics`, `recent`: counters, and the latest requests for the dashboard.
- `body`: reads and inflates a body. `fields`: parses it field by field, and refuses unknown fields.
- `parsing`: parses a body as a whole: one error names all of its wrong fields.
- `leases`: the program and the lease of a request, by headers and by fields of OpenAI's API.
- `tables/`: which fields each body has: taken, without effect, or refused by name.
- `params`: sampling options, prompts and constraints, under the names of each dialect.
- `sse`: merges the chunks of several generations, and sends them as server-sent events.
- `errors`: errors as responses.
- `keys/`: API keys, their limits, and the names that their requests have in the engine.
- `telemetry/`: log lines and spans of requests, and their ids.
- `calls`: Ramify's own endpoint for single calls of programs. The endpoint that runs a whole program is
  `ramify.programs.route`, since it needs `lang`, which nothing in this folder imports.

Dialects: `admin/` (health, model and server information, the dashboard), `openai/` (chat completions,
completions, models, and in `responses/` the Responses API), `anthropic/` (the Messages API), `sglang/`
(SGLang's native API), `ollama/` (Ollama's API), `llamacpp/` (llama.cpp's ``/infill``), `decisions/` (OpenAI's
Decisions API, System One, reranking). `app/` combines the dialects into one application and serves it.
"""
