"""The engine of a server in a process of its own, and the messages between it and the web."""
