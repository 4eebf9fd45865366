"""Reports for people: tables for terminals, and pages as single files."""
