"""The KV cache of either form, and the sequences in it."""
