"""What `prep mask` does."""
