"""What a run has told, and how one goes on from that: its logbook, its beginning, its end.

Not here: events on disk (observe.journal), States in the store (checkpoint).
No Ray. Invariant: whoever takes a run over knows from the record what its last leader knew.
"""
