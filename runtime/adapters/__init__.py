"""Adapters in canonical form: load, cast, pack, blend, shard and save."""
