"""Trackers, which show a run as it goes, besides its log and the terminal."""
