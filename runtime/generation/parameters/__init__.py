"""What is asked of an answer: by a caller, or by the model itself."""
