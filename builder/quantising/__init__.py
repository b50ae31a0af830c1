"""Codes for the weights of a float model: what is rounded, how, and on which text."""
