"""Worker processes with limits of memory and time, for work on untrusted files."""
