"""Decisions over HTTP."""
