#!/bin/bash
# Runs a command on the CPUs that are nearest to the GPU of this SLURM task.
#
#     jobs/slurm/bind.sh COMMAND...
#
# The kernel knows which CPUs share a NUMA node with a PCI device. Without a GPU, or where the kernel
# does not know, the command runs unbound. SYSFS is for tests.
set -euo pipefail

near="" gpu="${CUDA_VISIBLE_DEVICES:-}"
gpu="${gpu%%,*}"
if [[ -n "${gpu}" ]] && command -v nvidia-smi >/dev/null; then
    bus="$(nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader --id="${gpu}" || true)"
    # nvidia-smi says 00000000:3B:00.0 where the kernel says 0000:3b:00.0
    bus="$(tr '[:upper:]' '[:lower:]' <<<"${bus#0000}")"
    list="${SYSFS:-/sys}/bus/pci/devices/${bus}/local_cpulist"
    if [[ -n "${bus}" && -r "${list}" ]]; then
        near="$(<"${list}")"
    fi
fi

# taskset refuses CPUs that are not this job's; then unbound is better than not at all.
if [[ -n "${near}" ]] && taskset --cpu-list "${near}" true 2>/dev/null; then
    echo "elastix: task ${SLURM_PROCID:-0}, GPU ${gpu}: on CPUs ${near}" >&2
    exec taskset --cpu-list "${near}" "$@"
fi
echo "elastix: task ${SLURM_PROCID:-0}, GPU ${gpu:-none}: not bound to CPUs" >&2
exec "$@"
