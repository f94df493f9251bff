"""The worker group: who is in it, how it reduces, and what it does when a member dies.

protocol: what a member does, pure. network: sockets, process groups and shared memory. gradients:
buckets and their reduction. driver: carries the protocol out in a worker's training thread.
"""
