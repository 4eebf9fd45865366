"""Settings of a run: train.toml and command options."""
