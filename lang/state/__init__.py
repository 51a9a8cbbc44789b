"""The state `s` of a program, its forks, and its text and values while they are generated."""
