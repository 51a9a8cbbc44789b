"""Compiled functions that several CPU kernels share: the norm of a row, and numbers laid out in panels."""
