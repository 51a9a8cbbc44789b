"""The processes behind the frontend: tokenizer, scheduler, detokenizer and grammar compiler.

Starting and stopping them (a *worker* is any of these processes):

- `prestart`: starts workers before their configuration is known, so that their imports overlap with reading
  it.
- `engine_processes`: sends the configuration to the workers, waits until all are ready, notices deaths, and
  stops all workers.
- `shares`: cores and GPUs of each replica.
- `worker_start`: the entry point of every worker.
- `worker_process`: what all workers share: each reads its orders, and exits when its parent is gone.
- `ipc`: the sockets between the processes.

The work of each process (that of the scheduler is in `ramify.runtime.scheduler`):

- `tokenizer`, with `chat_rendering` for the chat template, `message_texts` for special tokens that messages
  spell, `choice_tokens` for choices that are scored after a prompt, `decision_tokens` for questions about
  one, and `trained_layout` for checkpoints that have a layout of their own.
- `detokenizer`, with `text_stream` for the text of one output.
- `grammar_compiler`.
"""
