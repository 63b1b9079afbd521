"""Pages, and tensors by slot."""
