"""Reads the files of OneTrainer."""
