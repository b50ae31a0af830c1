"""Sizes of the tiny models, for tests that have no torch."""

VOCABULARY, POSITIONS = 97, 64
