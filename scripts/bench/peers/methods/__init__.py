"""One file a peer: load, prompt, decode."""
