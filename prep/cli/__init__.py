"""The commands of prep: the only place that prints or exits."""
