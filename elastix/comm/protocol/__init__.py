"""What a member of the group does, whatever becomes of the others: memberships, recovery, joiners.

Not here: how that is done (driver), and what an operation computes (gradients, train.replica).
Pure: no torch, no sockets, no thread and no clock. Invariant: an operation that one member leaves
with a result, all leave with that result, or are dead, or have left the group.
"""
