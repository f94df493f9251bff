"""Elastic PyTorch training on Ray: survivors finish the very step in which a worker died."""
