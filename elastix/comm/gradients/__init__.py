"""Gradients on their way through the group: buckets, their reduction, and the result put back.

Not here: what becomes of a step whose reduction fails (protocol).
Invariant: until a step is committed the local gradients stay as autograd left them.
"""
