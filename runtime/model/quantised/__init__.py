"""Checkpoint folders that are already quantised: their tensors as rows.

`shape.quantised_config` reads their `quantization_config`, and refuses what is not implemented.

reader    the tensors of a folder, all tensors of a quantised matrix together
schemes   one function for each scheme: the stored tensors of a matrix as `kernels.weights.rows.Rows`
"""
