"""Resident adapters and the active one."""
