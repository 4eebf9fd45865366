"""Which bucket a picture goes to."""
