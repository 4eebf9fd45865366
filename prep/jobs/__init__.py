"""Commands that wait for one another in a project: each a process of its own, and a directory that tells of it."""
