"""Reads and writes `manifest.json` and its tables."""
