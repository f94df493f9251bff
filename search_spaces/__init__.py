"""Architectures to train and to search: one file per space, each with `space` and `build`."""
