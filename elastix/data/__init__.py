"""Which samples, and how often. No Ray, no torch.distributed."""
