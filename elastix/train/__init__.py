"""The imperative shell of training, on Ray.

trainer (the driver's side) starts a controller (one actor a run), which starts workers (one actor
each); a worker runs `train(ctx)` with a context, behind which member ties comm, data and state
together.
"""
