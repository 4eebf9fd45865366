"""Keeps local copies of caches in object stores: what is read of them is fetched, and checked, first."""
