"""captions."""
