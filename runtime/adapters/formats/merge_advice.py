"""Advice for adapters that no engine can take: the command that merges one into its base model."""

import shlex


def merge_advice(adapter: object) -> str:
    """Return what to do about an adapter of this path, for the end of a message."""
    command = f"trt-lora merge --model DIR --adapter {shlex.quote(str(adapter))} OUT"
    return f"merge it into the base model and build from that: {command}"
