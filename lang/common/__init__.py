"""Helpers used by all of `lang`: an event for threads and event loops, the line of the user's code for error
messages, and names that are refused."""
