"""Completions and chats: what is asked, how it is answered, what it looks like."""
