"""`train report`: a run as one page, from the files that it keeps; `train push`: what of it goes to the Hub."""
