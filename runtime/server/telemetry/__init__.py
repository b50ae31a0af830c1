"""What is seen of a server from outside: its metrics."""
