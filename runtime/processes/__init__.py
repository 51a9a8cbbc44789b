"""The processes behind the frontend: tokenizer, scheduler, detokenizer and grammar compiler.

Starting and stopping them (a *worker* is any of these processes):

- `prestart`: starts workers before their configuration is known, so that they import meanwhile.
- `engine_processes`: sends the configuration, waits until all are ready, notices a death, stops all.
- `shares`: cores and GPUs of each replica.
- `worker_start`: the entry point of every worker.
- `worker_process`: the life of a worker: it reads its orders, and exits when its parent is gone.
- `ipc`: the sockets between the processes.

The work of each (the scheduler is `ramify.runtime.scheduler`):

- `tokenizer`, with `choice_tokens` for choices that are scored behind a prompt, and `message_texts` for
  special tokens that messages spell.
- `detokenizer`, with `text_stream` for the text of one output.
- `grammar_compiler`.
"""
