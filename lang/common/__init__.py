"""Helpers of all of `lang`: an event for threads and loops, the user's line for errors, refused names."""
