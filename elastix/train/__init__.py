"""Training: what leads a run, what works in it, what it stores, and Ray around them.

control: decides, pure. replica: a worker, without Ray. checkpoint: States on their way to the
store and back. record: what a run has told, and how it goes on. on_ray: the actors and the driver.
"""
