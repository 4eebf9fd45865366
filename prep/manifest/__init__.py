"""manifest.json and its tables."""
