"""Tensor parallelism: one model over several processes, its ranks, of which the scheduler's is the first.

    scheduler, rank 0    schedules ─▶ tells the pass ─▶ runs it ─▶ logits, samples
    rank 1 … N - 1                        └─▶ runs it

The ranks run the same pass on their parts of the weights and KV pages, and sum what they have after attention
and after the MLP of each layer.

- `checks`: what cannot be divided, by the model's config and the options.
- `passes`: a pass as a message.
- `group`: the sums over the ranks, by torch.distributed.
- `ranks`: what the first rank does besides running its part.
- `process`: the process of any other rank.

`ramify.runtime.model.shard` says which part of each matrix a rank holds.
"""
