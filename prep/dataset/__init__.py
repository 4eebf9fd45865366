"""From a recipe's sources to samples in buckets."""
