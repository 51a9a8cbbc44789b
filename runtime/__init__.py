"""The runtime: requests in, tokens out.

engine       the engine in a user's script; config: the options of engine and server;
                 compile_ahead: the kernels, before the first run needs them
server       HTTP, one folder a dialect
frontend     request ids, answers, cancellation, back-pressure
processes    the tokenizer, the detokenizer and the grammar compiler; how processes start, talk and end
scheduler    which tokens the next step computes
executor     runs the model on them
parallel     the processes that one model is divided among
kv_transfer  cached pages as a KV snapshot, for another replica
fleet        several replicas on one machine
model        the model: files, families, tokenizers
"""
