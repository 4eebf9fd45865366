"""Executors of encoding tasks."""
