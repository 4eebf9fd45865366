"""`train report`: a run as one page, from the files that it keeps."""
