"""Fit an adapter to a manifest: one engine binding for every tensor."""
