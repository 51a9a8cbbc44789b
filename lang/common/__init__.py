"""Helpers used by all of `lang`: an event, the line of the user's code for errors, and refused names."""
