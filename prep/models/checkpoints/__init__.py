"""Files of weights: handed over to libraries, with their scales applied; single files, converted to a directory."""
