"""A run's files on disk, and its display."""
