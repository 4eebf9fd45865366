"""What a run of `prep encode` would take: before it, and for many more pictures on many devices."""
