"""The cache on disk: files, arrays, keys, rows."""
