#!/bin/bash
# Starts a Ray node of a SLURM job; arguments are those of `ray start`.
#
# Hosts are shared, by tasks of this job and by other people's. Ray nodes that use one directory
# take each other's socket names when they start at once, and what another user has made cannot be
# written: each node gets a directory of its own.
set -euo pipefail
folder="$(mktemp -d "${RAY_TMPDIR:-/tmp}/ray-${SLURM_JOB_ID}.XXXXXX")"
exec ray start "$@" --temp-dir="${folder}" --block --disable-usage-stats
