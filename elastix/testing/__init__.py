"""For users' tests too: kill workers at chosen places, replay a run in one process."""
