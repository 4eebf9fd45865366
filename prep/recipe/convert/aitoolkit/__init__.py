"""Reads the configurations of ai-toolkit."""
