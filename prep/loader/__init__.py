"""Makes batches from the rows of a cache."""
