"""`bireme bench`: how fast the calls are here, and how fast others' are in the same minutes."""
