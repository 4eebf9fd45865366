"""Sources of pictures: directories and tars. All yield the same items."""
