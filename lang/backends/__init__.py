"""Backends for programs: servers, scripts and recordings. An `Engine` is a backend, too."""
