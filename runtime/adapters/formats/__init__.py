"""One file for each on-disk format of adapters."""
