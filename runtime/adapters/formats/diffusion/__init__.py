"""Adapters of diffusion models, in the names and kinds that their trainers write."""
