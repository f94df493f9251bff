"""Who is in the group and how gradients add up. torch.distributed lives only here. No Ray.

Read in this order: membership (who), recovery (what survivors decide), rounds (how a worker goes
through it), reducer (the training step), group and transfer (the wires).
"""
