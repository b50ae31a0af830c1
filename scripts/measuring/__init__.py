"""Times, memory and random adapters that benchmarks share."""
