"""Verbs of the command line that are more than a few lines: a file each, registered in cli."""
