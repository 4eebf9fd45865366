"""Embeddings of pictures: made before pictures are encoded, and read from caches."""
