"""Torch on this machine: its thread team, copies to a device, and the error of a backend that cannot run."""
