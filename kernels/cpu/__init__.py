"""Kernels for x86-64 and Arm processors, compiled on the machine by numba's LLVM.

Operations, each a twin of the one in `kernels.reference`:
    attention           paged attention, divided among a team of threads
    linear              products with packed weights
    linear_masked       the same, for only the outputs that masks allow
    rope, sampling, experts, gated_delta, lora
    rowwise             norms, gated activations, soft caps and log-sums of rows
    layer_stack         all layers of a step in one call of these kernels

Inside attention:
    attention_plan      which queries share a tile, and which blocks the tile reads; the cascade
    attention_records   the arguments, work items and segments that threads share
    attention_tile      one work item: copy keys and values, multiply
    attention_softmax   the online softmax of a tile
    attention_loops     its two inner loops in LLVM code
    attention_amx       its products by AMX tiles
    attention_int8      scores of int8 keys by AMX tiles

Inside products: `packed_linear`. Used by several operations: `parts`. What all kernels are built with:
`codegen`.
"""
