"""What the CPU kernels are built with.

compiler            numba with a cache on disk: `compiled`, `callback`, `part`; what a machine must have
simd                vectors of float32, and numbers in memory; kernels import it as `vl`, vector language
dots                dot products of bfloat16 pairs, where the processor has them
functions           functions written in LLVM code
records, arena      arguments and working memory of a call
team                torch's OpenMP thread team
thread_team_calls   calls of C functions from inside kernels: on one thread, or on all of the team
"""
