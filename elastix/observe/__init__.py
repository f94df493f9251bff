"""Readers of events: journal, console, loggers, metrics, timeline, and folds that these share."""
