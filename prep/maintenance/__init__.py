"""Verifies, repairs, compacts and cleans caches."""
