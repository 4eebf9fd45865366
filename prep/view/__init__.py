"""Shows a manifest in a browser, live and read-only, served to this computer alone."""
