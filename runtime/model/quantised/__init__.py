"""Checkpoints that are quantised themselves: their `quantization_config`, and their tensors as rows.

schemes   one function a scheme: the stored tensors of a matrix as `kernels.packed.Rows`
"""
