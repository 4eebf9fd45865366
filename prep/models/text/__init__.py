"""Encodes and counts text with a pipeline's own tokenizers and text encoders."""
