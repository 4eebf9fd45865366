"""Reads the files of sd-scripts and its GUI, kohya_ss."""
