"""Encodes datasets: the work of `prep encode`."""
