"""Kernels for x86-64 and Arm processors, compiled on the machine by numba's LLVM.

compiler        signatures, the cache on disk, what a machine must have
simd            vectors of float32 inside numba
dots            dots of bfloat16 pairs
tiles           the register-blocked product and the transposing copy
team            torch's thread pool
attention       paged attention, shared out to threads
attention_plan  which queries share a tile, and what it reads
attention_tile  one share
linear          products with packed weights, shared out to threads
linear_items    one share
linear_tiles    its inner loops
linear_masked   products of which masks ask for few outputs
kv_store        writing rows of pages and copying pages
rope            rotary positions, fused with the write
norm            RMS normalisation
"""
