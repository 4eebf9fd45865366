"""Which checkpoint of a run to take: pictures of each are drawn, embedded and compared with those of the data set."""
