"""Tests that need an NVIDIA GPU."""
