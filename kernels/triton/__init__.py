"""Kernels for NVIDIA GPUs in Triton; on machines without one they run in Triton's interpreter."""
