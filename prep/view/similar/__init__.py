"""Pages of what embeddings say of a manifest's samples."""
