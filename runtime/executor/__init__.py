"""The model executor: batches, KV pool, attention, sampling, CUDA graphs."""
