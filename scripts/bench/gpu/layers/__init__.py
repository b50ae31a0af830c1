"""Parts of a measured step: decoder layers, LoRA methods, engines, adapters."""
