"""A recipe's sources to samples in buckets."""
