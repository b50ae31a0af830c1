"""Requests that wait for a row and a slot, and those that have both."""
