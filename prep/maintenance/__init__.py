"""Looking after a cache."""
