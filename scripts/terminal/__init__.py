"""What the commands share: arguments, tables, progress, warnings."""
