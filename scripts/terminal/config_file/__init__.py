"""Options of `build-engine` in a TOML file."""
