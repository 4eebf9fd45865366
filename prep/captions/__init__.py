"""Caption files to captions and their variants."""
