"""Searchers, one file each; what they have in common is `trial.Searcher` and search_history.py."""
