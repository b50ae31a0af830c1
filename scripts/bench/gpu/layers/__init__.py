"""What a workload runs: decoder layers, ways to add LoRA to them, engines, adapters."""
