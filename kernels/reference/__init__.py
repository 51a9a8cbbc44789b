"""Every operation in plain torch: the contract, the oracle of the kernels' tests, and a fallback."""
