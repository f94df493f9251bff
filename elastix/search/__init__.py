"""Searching: searchers propose, rungs decide, executors run; each is useful without the others."""
