"""What `prep encode` does."""
