"""One file a peer: load and answer."""
