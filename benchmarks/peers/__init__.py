"""Other systems through the same failure: one worker of five is killed in the middle of backward.

Each system has a module that is run by itself, in an environment that has that system:

    python -m benchmarks.peers.torchft_group --repeats 3 --heartbeat 0.5 --out torchft.json
    python -m benchmarks.peers.ray_train --repeats 3 --out ray_train.json

``workload`` is the model, the data and the kill that all of them share, ``summary`` is the
accounting that turns the workers' step logs into the same numbers for everybody.
"""
