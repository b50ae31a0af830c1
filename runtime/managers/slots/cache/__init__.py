"""The adapter cache: which generation of an adapter lies at which level."""
