"""Makes rows of latents that other programs cached, instead of encoding pictures."""
