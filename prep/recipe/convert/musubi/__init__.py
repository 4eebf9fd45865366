"""Reads the files of musubi-tuner."""
