"""Estimates what a run of `prep encode` would take."""
