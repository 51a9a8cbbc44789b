"""The runtime: requests in, tokens out.

The modules beside this file serve several of the folders: `config` (the options of engine and server), names
(`host_names`, `lora_names`, `rope_fields`), `default_model` (says that it answers), `generation` (an output,
put together from its chunks), `cores`, `host_memory`, `faults`, `compile_ahead` (compiles the kernels before
they are first used).

model        the model: files, families, tokenizers
parallel     the processes that one model is divided among
executor     runs the model
kv_transfer  KV snapshots: cached pages for another replica
cold         KV pages in files and in the host's memory
scheduler    which tokens the next step computes
processes    the tokenizer, the detokenizer and the grammar compiler; how processes start, talk and end
fleet        several replicas behind one frontend
frontend     request ids, answers, cancellation, back-pressure
inspect      the memory that a model would need, without loading it
quantize     writes packed weights
models       several models: loaded when used, unloaded when memory is needed
engine       the engine in a user's script
server       HTTP, one folder for each API dialect

Layers, lowest first: own modules; model.shape; model; model.families; model.transformers;
model.gguf; model.lora; model.tokenizer; model.hub; model.loading; processes; parallel; executor;
kv_transfer; cold; scheduler.requests; scheduler.speculation; scheduler; inspect; quantize; fleet; frontend;
models; engine; server.tables; server.telemetry; server.keys; server; server.openai; server.openai.responses;
server.decisions; server.anthropic; server.ollama; server.llamacpp; server.admin; server.sglang; server.app.
"""
