"""Reports for people: terminal tables and one HTML page."""
