"""Pages as single HTML files: of a scan, of buckets, masks and manifests."""
