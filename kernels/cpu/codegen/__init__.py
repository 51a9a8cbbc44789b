"""What compiled CPU kernels are made of: the compiler, vector types, threads and working memory."""
