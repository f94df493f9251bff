"""What decides about a run: pure, without Ray, torch, threads or a clock of its own.

messages is what workers and their controller say to each other.
"""
