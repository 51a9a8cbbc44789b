"""The error of a backend that cannot run here."""

from __future__ import annotations


class KernelUnavailable(RuntimeError):
    """This machine cannot run the backend; the message says why and what to use instead."""
