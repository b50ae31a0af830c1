"""Text and token ids of prompts and answers."""
