"""`make demo`: a real model with three adapters."""
