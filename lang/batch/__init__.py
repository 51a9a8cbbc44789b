"""Many runs of one program: bounded concurrency, an order that groups common prefixes, a results file."""
