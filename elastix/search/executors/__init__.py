"""Where trials run: in this process, on a pool of Ray workers, or as trials of Ray Tune.

An executor knows nothing of spaces, searchers or scores: it takes work, and says what came of it.
"""
