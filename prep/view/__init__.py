"""Shows pictures, a manifest or a run in a browser, live, served to this computer alone."""
