"""buckets."""
