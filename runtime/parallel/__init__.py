"""Tensor parallelism: one model over several processes, the ranks. The scheduler's process is the first rank.

    scheduler, rank 0    schedules ─▶ tells the pass ─▶ runs it ─▶ logits, samples
    rank 1 … N - 1                        └─▶ runs it

The ranks run the same pass on their parts of the weights and KV pages. After attention and after the MLP of
each layer they sum their terms.

- `checks`: models and options that cannot be divided, by the model's config.
- `ranks`: this process as one rank, and the sums over the ranks; the first tells the others of every pass.

`ramify.runtime.executor.rank_process` is the process of any other rank, `executor.batch` defines the message
that sends a pass, and `ramify.runtime.model.shape.shard` the part of each matrix that a rank holds.
"""
