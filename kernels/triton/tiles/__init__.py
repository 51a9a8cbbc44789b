"""Device code that several Triton kernels share: tiles of attention and of sampling."""
