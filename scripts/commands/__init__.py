"""Subcommands of `trt-lora`, one file each."""
