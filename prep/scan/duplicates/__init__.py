"""Finds pictures that are copies of others."""
