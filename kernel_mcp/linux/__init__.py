"""The ground floor: what Linux offers, as calls that know nothing of kernels and sessions."""
