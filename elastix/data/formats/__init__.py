"""Datasets by position: what has an index, what is read through one, and what is refused."""
