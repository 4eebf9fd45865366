"""Prompts edited while training: encoded beside it."""
