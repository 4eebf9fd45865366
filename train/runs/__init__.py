"""What a run keeps on disk and shows."""
