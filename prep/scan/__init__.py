"""What `prep scan` does."""
