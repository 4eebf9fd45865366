"""Buckets: their sizes, and the assignment of pictures to them."""
