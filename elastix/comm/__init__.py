"""Who is in the group and how gradients add up. torch.distributed lives only here. No Ray.

Read in this order: membership (who), recovery (what survivors decide), protocol (how a member goes
through it), rounds (the same in a thread), reducer (the training step), group and transfer (the
wires).
"""
