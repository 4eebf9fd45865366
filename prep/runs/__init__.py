"""Reads what a training run keeps on disk: for train itself, and for the pages about runs."""
