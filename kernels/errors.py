"""What a backend raises where it cannot run."""

from __future__ import annotations


class KernelUnavailable(RuntimeError):
    """This machine cannot run the backend; the message says why and what to use instead."""
