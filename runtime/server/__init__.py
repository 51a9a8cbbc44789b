"""The HTTP server: one folder for each API dialect, and what the dialects share.

- `openai/`: chat completions, completions, models, and in `responses/` the Responses API.
- `sglang/`: SGLang's native API.
- `admin/`: health, metrics, model and server information, the dashboard.
- `calls`: Ramify's own endpoint for the calls of programs. The endpoint that runs a whole program is in
  `ramify.program_route`, since it needs `lang`, which nothing in here imports.

Shared:

- `serve`: the server's process, from the configuration to a clean exit.
- `app`: puts routers, error handlers and middleware together.
- `service`: the frontend, metrics and recent requests. `Service.generate` returns every endpoint's chunks.
- `connection`: HTTP/1.x beyond what uvicorn does. `body`: reads and inflates a body.
- `fields`: parses a JSON body field by field, and refuses unknown fields.
- `params`: sampling options, prompts and constraints, under the names of each dialect.
- `streams`: merges the chunks of several generations. `sse`: sends them as server-sent events.
- `errors`, `middleware`.
"""
