"""Reads the configurations of diffusion-pipe."""
