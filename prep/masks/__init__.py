"""Makes mask pictures: the work of `prep mask`."""
