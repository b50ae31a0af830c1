"""`make demo`: a real model, three adapters."""
