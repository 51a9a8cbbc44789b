"""Tests of the Triton kernels in the interpreter."""
