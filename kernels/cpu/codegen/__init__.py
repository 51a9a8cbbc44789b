"""Tools that the CPU kernels are built with.

compiler    numba with a cache on disk: `compiled`, `callback`, `part`; the machine's instruction sets
simd        vectors of float32, and numbers in memory; kernels import it as `vl`, vector language
dots        dot products of bfloat16 pairs, where the processor has them
timers      counters of a step's parts, for benchmarks
functions   functions written in LLVM code; calls of C functions on one thread, or on all of the team
"""
