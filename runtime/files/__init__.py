"""Reading untrusted files: unchanged meanwhile, bounded, type-checked."""
