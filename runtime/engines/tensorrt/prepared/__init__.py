"""Runs that come again and again."""
