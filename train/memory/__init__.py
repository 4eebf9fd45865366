"""What memory a run takes, from a training step without weights."""
