"""Names of a step's outputs and cache that engine, manifest and runtime agree on."""

LOGITS = "logits"  # the first output
CACHE, NEW_CACHE = "cache.", "new_cache."  # beginnings of a static cache's inputs and outputs
SECOND_STREAM = "second_stream"  # an output of plans alone, for no reader
