"""Operations on paged keys and values, weights and logits, in three backends of the same operations.

reference/   plain torch: each operation's contract
cpu/         compiled for x86-64 and Arm by numba
triton/      for NVIDIA GPUs; flashinfer.py has FlashInfer's attention instead of Triton's

An operation has the same name and signature in each backend that has it; `registry.ops` chooses a backend.
Shared: arguments/ and their checks, weights/ as kernels read them, machine/.
This package imports nothing else of Ramify.

Layers, lowest first: machine; cpu.codegen; cpu.parts; weights; arguments; reference; cpu.packed_linear; cpu;
triton.tiles; triton.plan; triton; triton.trials; own modules.
"""
