"""Which pictures are copies of others."""
