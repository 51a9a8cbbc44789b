"""Triton itself: its interpreter or a device, and the launch parameters of bandwidth-bound kernels."""
