"""Recipes: reading, checking, writing and converting `dataset.toml`."""
