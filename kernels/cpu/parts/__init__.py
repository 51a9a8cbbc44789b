"""Compiled functions that several CPU kernels share: norms of rows, numbers in panels, rows of int8 pages."""
