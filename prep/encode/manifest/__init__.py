"""Writes the manifest of an encode: its document, tables, and what becomes of the one that it replaces."""
