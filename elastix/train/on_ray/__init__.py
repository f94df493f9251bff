"""The shells on Ray: the trainer (in the driver's process), controller, workers, their places.

Not here: decisions (control), and what a worker computes (replica); these do as they are told.
Invariant: whatever process dies, its resources, actors and names on the cluster go with the run.
"""
