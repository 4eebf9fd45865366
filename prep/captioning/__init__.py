"""Makes captions of pictures: the work of `prep caption`."""
