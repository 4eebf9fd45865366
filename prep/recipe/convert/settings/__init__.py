"""What other tools' training settings become in a `train.toml`, by tool and subject."""
