"""Runs in object stores: published from a working copy here, and brought back."""
