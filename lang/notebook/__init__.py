"""What notebooks show of states, traces and batches, and the view of a program while it runs."""
