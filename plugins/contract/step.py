"""Names of a step's outputs and caches, and of a source, that engine and runtime agree on."""

LOGITS = "logits"  # the first output
CACHE, NEW_CACHE = "cache.", "new_cache."  # beginnings of a static cache's inputs and outputs
SECOND_STREAM = "second_stream"  # an output of plans alone, for no reader

# Of an encoder-decoder: the input of the encoder, what it writes for every decoder layer, and how
# many positions of that a row has.
SOURCE, SOURCE_LENGTHS = "source", "source_lengths"
CROSS, NEW_CROSS = "cross.", "new_cross."
