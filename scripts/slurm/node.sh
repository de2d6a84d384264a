#!/usr/bin/env bash
# One node's part of a job (train.sbatch): a torchrun that meets those of the other nodes at the first one.
#
# PROCESSES: of this node, one per GPU by default. On USR1 or TERM the processes are told to save and leave; torchrun
# itself would kill them 30 seconds later, which is short for a large checkpoint, so it is not told.
set -u

[[ -f .venv/bin/activate ]] && source .venv/bin/activate
head=${HEAD_NODE:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
port=${RENDEZVOUS_PORT:-$((20000 + SLURM_JOB_ID % 20000))}

python -m torch.distributed.run --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="${PROCESSES:-gpu}" \
    --rdzv-backend=c10d --rdzv-endpoint="$head:$port" --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    train.py "$@" &
agent=$!

stop() {
    workers=$(cat "/proc/$agent/task/$agent/children" 2> /dev/null)
    # shellcheck disable=SC2086 (one word per process)
    kill -TERM ${workers:-$agent}
}
trap stop USR1 TERM

wait "$agent"
code=$?
while kill -0 "$agent" 2> /dev/null; do  # a signal ends a wait
    wait "$agent"
    code=$?
done
exit "$code"
