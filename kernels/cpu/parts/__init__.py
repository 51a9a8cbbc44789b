"""Compiled functions that several CPU kernels share: the norm of a row, numbers laid out in panels, rows of int8 pages."""
