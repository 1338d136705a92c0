"""What cells put out: kept in order and within bounds, and rendered for a model."""
