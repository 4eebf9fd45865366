"""Checkpoints in other layouts than a diffusers directory."""
