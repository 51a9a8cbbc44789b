"""Operations on paged keys and values, weights and logits, in three backends of the same operations.

reference/   plain torch: each operation's contract
cpu/         compiled for x86-64 and Arm by numba
triton/      for NVIDIA GPUs; flashinfer.py: attention by another library in its place

An operation has the same name and signature in each backend that has it; `registry.ops` chooses a backend.
Shared: checks.py, sampling_inputs.py (arguments); rows.py, packed.py (weights); stack.py (layers);
transfers.py (copies to a device); errors.py.
This package imports nothing else of Ramify.
"""
