"""The KV cache, the rows of sequences in it, and the steps that run them."""
