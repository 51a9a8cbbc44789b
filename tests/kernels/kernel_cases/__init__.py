"""Cases of `benchmarks.kernels`: each module here registers a family of cases (see `base`)."""
