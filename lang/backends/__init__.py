"""Servers, scripts and recordings that programs run on; an `Engine` is a backend by itself."""
