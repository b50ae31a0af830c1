"""Text generation: prompts, decoding, sampling and detokenization."""
