"""What serving requests with many adapters costs on the host."""
