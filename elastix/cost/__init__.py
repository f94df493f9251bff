"""What a training run costs before it is started: FLOPs, bytes, time, money's worth of devices.

trace runs two steps of a model on tensors without memory and counts; devices says what hardware
can do; plan is the arithmetic between them. Nothing here trains, and nothing needs a group.
"""
