"""Kernels for x86-64 and Arm processors, compiled on the machine by numba's LLVM.

Common ground:
    compiler        signatures, the cache on disk, what a machine must have
    simd, dots      vectors of float32, and dots of bfloat16 pairs
    team, fork      torch's thread pool, and calls on it from inside kernels
    arena           working memory

Attention:
    attention       paged attention, shared out to threads
    attention_plan  which queries share a tile, and what the tile reads
    attention_tile  one tile
    tiles           its two inner loops

Products with packed weights:
    linear          shared out to threads
    linear_masked   only the outputs that a mask asks for
    linear_items    one thread's share
    linear_rows     the rows of x as the inner loops read them
    linear_tiles, linear_int8, linear_code   the inner loops: floats, int8, and what both share

The rest: norm, rope, kv_store, logits, sampling; and layer_stack, all layers of a step in one call.
"""
