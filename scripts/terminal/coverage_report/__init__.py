"""Reports of an adapter's coverage: a grid of sites, or a line for every tensor."""
