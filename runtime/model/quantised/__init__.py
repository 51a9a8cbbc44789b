"""Checkpoints that are quantised themselves: their `quantization_config`, and their tensors as rows.

config    what `quantization_config` says, and what of it is refused
reader    the tensors of a folder, those of a quantised matrix together
schemes   one function a scheme: the stored tensors of a matrix as `kernels.weights.rows.Rows`
"""
