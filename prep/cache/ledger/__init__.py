"""Which rows a cache has, and where."""
