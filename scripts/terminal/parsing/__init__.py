"""The argument parser of all commands."""
