"""Writes a manifest's samples in formats that other programs read: `prep export`."""
