"""Linears of graphs by other exporters: their weights, and the names of their modules."""
