"""A dataset as one tar: manifest, shards and tables, written and read back with every digest checked."""
