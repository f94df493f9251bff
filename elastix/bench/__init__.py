"""A train function measured at several group sizes, with kills, and beside torch's DDP."""
