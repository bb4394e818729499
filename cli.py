"""argv -> one call."""
