"""Many runs of one program: bounded concurrency, rows that share a prefix together, a results file."""
