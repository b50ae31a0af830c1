"""LoRA at what is no plain linear: convolutions, the embedding, and vectors behind every site."""
