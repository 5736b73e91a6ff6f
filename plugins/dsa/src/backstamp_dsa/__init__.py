"""Sparse and dense latent attention for Backstamp: the kernels `dsa`, `dsv4` and `flashmla`."""
