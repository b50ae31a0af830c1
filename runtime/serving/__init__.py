"""Continuous batching: who joins when, the steps of a batch, and answers to prompts."""
