"""Verification of an engine: inputs, references and tolerances."""
