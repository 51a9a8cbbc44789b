"""A program, its run and its branches: from a decorated function to the steps of each branch."""
