"""A third party's attention over PyTorch, behind a key of its own."""
