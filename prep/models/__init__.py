"""What a model family is, and the encoders that make its rows."""
