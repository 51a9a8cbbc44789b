"""Kernels for NVIDIA GPUs in Triton; without a GPU they run in Triton's interpreter, for tests.

Operations, each a twin of the one in `kernels.reference`: attention, cascade, kv_store, rope, norm,
activation, matmul, quantised, float8, experts, gated_delta, lora, logits, sampling.
planner: attention as the runtime uses it, with plans made on the host (`plan`), launches of device code
(`tiles`) and room for CUDA graphs. ahead: forms compiled before their launches. `tiles/launch.py`: what
all launches share. `trials`: kernels that no card has timed, off by default.
"""
