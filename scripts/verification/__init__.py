"""Is an engine right: inputs, references and tolerances."""
