"""What runs inside a worker: the train function's context, and the member of the group behind it.

Not here: how a process comes to be a worker (on_ray, testing.local), which it sees as a Link.
No Ray. Invariant: whatever replicas share changes at the boundary of an operation, and there alike
on all of them.
"""
