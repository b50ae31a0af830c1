"""Results on standard output: for a terminal, for a pipe, for scripts."""
