"""Logits of one row: changed before a token is chosen, and as log probabilities after."""
