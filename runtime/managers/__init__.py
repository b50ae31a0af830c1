"""Which adapters are resident and which one is active."""
