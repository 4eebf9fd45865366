"""Converts other tools' training settings to those of a `train.toml`, by tool and subject."""
