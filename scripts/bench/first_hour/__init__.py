"""Start-up times of the commands that a new user types first."""
