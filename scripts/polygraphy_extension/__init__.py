"""LoRA extension of `polygraphy run`: options, runners and data loaders."""
