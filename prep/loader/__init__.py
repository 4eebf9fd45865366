"""Rows of a cache to batches."""
