"""What connects workers: authenticated sockets, process groups of torch, memory that a host shares.

Not here: who is to be connected, and when (protocol). Operations are asynchronous and never raise.
Invariant: whoever waits for a dead peer can leave at once; no buffer goes before its operations.
"""
