"""States of a run on their way into the store, and back.

`schedule` says when one is due. `snapshot` copies it while training goes on, and `saver` writes a
worker's share of it. The `coordinator`, beside the controller, divides the work as `assembly`
decides, commits the whole, and drops what `retention` does not keep. `restore` chooses what a run
goes on from.
"""
