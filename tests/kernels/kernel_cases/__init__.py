"""What `benchmarks.kernels` measures: each module here registers a family of cases (see `base`)."""
