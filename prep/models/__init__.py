"""Model families, and the encoders that make their rows."""
