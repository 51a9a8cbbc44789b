"""One call of a program: from a branch's prompt to a request, and from its chunks to an output."""
