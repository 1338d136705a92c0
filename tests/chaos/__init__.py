"""Twenty sessions and everything that can befall them, compared with a model after each step."""
