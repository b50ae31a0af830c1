"""Continuous batching: who joins when, the steps, and answers to prompts."""
