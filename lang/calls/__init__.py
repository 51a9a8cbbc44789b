"""One call of a program: from the prompt of a branch to a request, and from chunks to an output."""
