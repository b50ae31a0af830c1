"""The adapters of one engine: names, versions, and where each of them lies."""
