"""Files on local disks."""
