"""Generates pictures from prompts."""
