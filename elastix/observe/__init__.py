"""Readers of events: the journal on disk, the console."""
