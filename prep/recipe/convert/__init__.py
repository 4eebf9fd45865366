"""Converts other trainers' dataset files to recipes, with a note for each setting that has no counterpart here."""
