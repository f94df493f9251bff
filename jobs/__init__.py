"""Entry points for `ray job submit`, and recipes for them. No logic."""
