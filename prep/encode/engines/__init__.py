"""Runs the tasks of an encode: on the devices of this computer, or on a Ray cluster."""
