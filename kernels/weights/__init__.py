"""Weights as kernels read them.

rows         rows of matrices as checkpoints have them, quantised or not
packed       matrices in panels, for the compiled CPU kernels
quantised    matrices in blocks of inputs, for GPU kernels
routing      how a mixture of experts chooses experts
lora         adapters, and the rows of a step that use them
stack        all weights of a decoder layer
"""
