"""train.toml."""
