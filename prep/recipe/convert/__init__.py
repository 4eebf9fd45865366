"""Data set files of other trainers → recipes, with a note for each setting that has no counterpart here."""
