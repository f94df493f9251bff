"""Leads a run: who is in it, who has failed, when it ends, and what is to be done about that.

Not here: doing it (on_ray, testing.local), and what a group agrees on by itself (comm.protocol).
Pure: no Ray, no torch, no thread and no clock. Invariant: the same messages, deaths and times give
the same actions, whoever carries them out.
"""
