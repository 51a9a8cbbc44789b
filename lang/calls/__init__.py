"""One request of a program: its options and limits, its delivery over several attempts, and its output."""
