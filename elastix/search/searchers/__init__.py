"""Searchers, one file each; what they have in common is `trial.Searcher` and known.py."""
