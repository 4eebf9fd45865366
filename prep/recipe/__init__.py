"""dataset.toml."""
