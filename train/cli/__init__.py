"""The commands of train."""
