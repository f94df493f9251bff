#!/bin/bash
# Starts Ray over the allocation of a SLURM job, runs a command on it, stops Ray again.
#
#     jobs/slurm/cluster.sh COMMAND...
#
# The head has no CPUs and no GPUs to give; each task of the job is a Ray node of its own, with the
# GPUs and CPUs that SLURM gave that task. The command runs where this script does, and finds the
# cluster through RAY_ADDRESS. Only who has this job's token can use it.
#
# USR1 (see --signal in the .sbatch files) means that time is nearly over: the command is
# interrupted and the job goes back to the queue. A run with the same name and store goes on.
set -euo pipefail
set -m # background jobs in groups of their own, which also lets the command see SIGINT

: "${SLURM_JOB_ID:?this script runs inside a SLURM job: sbatch jobs/slurm/single_node.sbatch}"
here="${SLURM_SUBMIT_DIR}/jobs/slurm"
patience_s="${ELASTIX_START_TIMEOUT_S:-180}"

umask 077
private="$(mktemp -d "${SLURM_SUBMIT_DIR}/.ray-${SLURM_JOB_ID}.XXXXXX")"
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH="${private}/token"
od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"${RAY_AUTH_TOKEN_PATH}"

head="" nodes="" driver=""
requeue=""

# shellcheck disable=SC2329 # a trap calls it
finish() {
    trap - EXIT
    # The head last: without it the other nodes wait half a minute for somebody to say goodbye to.
    for step in ${driver} ${nodes} ${head}; do
        kill -TERM "${step}" 2>/dev/null || true
        wait "${step}" 2>/dev/null || true
    done
    rm -rf "${private}"
}
trap finish EXIT
trap 'exit 143' TERM

# shellcheck disable=SC2329 # a trap calls it
time_is_over() {
    requeue=yes
    if [[ -n "${driver}" ]]; then
        kill -INT "${driver}" 2>/dev/null || true
    fi
}
trap time_is_over USR1

mapfile -t hosts < <(scontrol show hostnames "${SLURM_JOB_NODELIST}")
first="${hosts[0]:?scontrol named no host of this job}"
read -r address _ < <(srun --nodes=1 --ntasks=1 --overlap --nodelist="${first}" hostname -I)
# Jobs that share a node must not share ports: this one and the two after it.
port="${ELASTIX_RAY_PORT:-$((20000 + SLURM_JOB_ID % 10000 * 3))}"
export RAY_ADDRESS="${address}:${port}"

srun --nodes=1 --ntasks=1 --overlap --nodelist="${first}" \
    "${here}/node.sh" --head --node-ip-address="${address}" --port="${port}" \
    --dashboard-port="$((port + 1))" --ray-client-server-port="$((port + 2))" \
    --num-cpus=0 --num-gpus=0 &
head="$!"

deadline=$((SECONDS + patience_s))
until ray health-check --address "${RAY_ADDRESS}" 2>/dev/null; do
    if ! kill -0 "${head}" 2>/dev/null || ((SECONDS > deadline)); then
        echo "elastix: the head of Ray did not come up at ${RAY_ADDRESS} within ${patience_s} s" >&2
        exit 1
    fi
    sleep 1
done

# A node that fails takes its workers with it and nothing else.
srun --no-kill --kill-on-bad-exit=0 --cpu-bind=none "${here}/bind.sh" \
    "${here}/node.sh" --address="${RAY_ADDRESS}" --num-cpus="${SLURM_CPUS_PER_TASK:-1}" \
    --object-store-memory=1000000000 &
nodes="$!"

# What asks how large the cluster is must see all of it. A node that does not come is done without.
tasks="${SLURM_NTASKS:-$((SLURM_NNODES * ${SLURM_NTASKS_PER_NODE:-1}))}"
deadline=$((SECONDS + patience_s))
while [[ -z "${requeue}" ]]; do
    present="$(ray list nodes --filter state=ALIVE --limit 10000 --format json 2>/dev/null |
        grep -o '"node_id"' | wc -l || true)"
    ((present -= 1)) || true # the head
    if ((present >= tasks)); then
        break
    elif ! kill -0 "${nodes}" 2>/dev/null || ((SECONDS > deadline)); then
        echo "elastix: only ${present} of ${tasks} tasks have joined Ray within ${patience_s} s" >&2
        ((present > 0)) || exit 1
        break
    fi
    sleep 1
done

echo "elastix: job ${SLURM_JOB_ID}, start ${SLURM_RESTART_COUNT:-0}, Ray at ${RAY_ADDRESS}: $*"
status=75
if [[ -z "${requeue}" ]]; then
    "$@" &
    driver="$!"
    status=0
    wait "${driver}" || status="$?"
    while kill -0 "${driver}" 2>/dev/null; do # a signal ended the wait, not the command
        status=0
        wait "${driver}" || status="$?"
    done
fi

if [[ -n "${requeue}" && "${status}" -ne 0 ]]; then
    echo "elastix: job ${SLURM_JOB_ID} goes back to the queue; the run goes on from its last State"
    scontrol requeue "${SLURM_JOB_ID}"
    exit 0
fi
exit "${status}"
