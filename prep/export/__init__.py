"""Writes a manifest's samples for other programs, `prep export`, and a dataset as one tar, `prep pack`."""
