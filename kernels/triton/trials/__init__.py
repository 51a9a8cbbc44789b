"""Kernels that no card has timed, off until a figure says otherwise (docs/decisions/0098).

`kernels.trials` names them, and `python -m benchmarks.gpu_visit D` times each on against off.
"""
