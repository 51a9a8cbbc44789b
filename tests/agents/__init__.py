"""Agents' own command lines, unmodified, in sessions against a server."""
