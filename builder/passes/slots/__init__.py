"""Graphs of engines for many adapters: the slot of every token, and the operators' bodies."""
