"""Terminal input and output of the commands: arguments, tables, progress, warnings."""
