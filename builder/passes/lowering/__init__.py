"""Traced arithmetic as operators that a runtime has."""
