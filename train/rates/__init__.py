"""Learning rates tried before a run: the range test of `train check --find-lr`."""
