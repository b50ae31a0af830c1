"""LoRA in `polygraphy run`: options, runners and data loaders."""
