"""Objects in S3, Google Cloud Storage and Azure: the room of obstore."""
