"""What decides about a run: pure, without Ray, torch, threads or a clock of its own.

conductor leads; actions are what it wants done, messages what workers and it say to each other.
"""
