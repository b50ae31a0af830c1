"""Export with a KV cache of fixed size."""
