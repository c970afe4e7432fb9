#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Four machines with two processes each: sbatch examples/slurm.sh
# The job may be queued again at any time: SLURM sends SIGUSR1 two minutes before the end, the run saves and stops, and
# --resume auto goes on from there. The folder of the run must be one that all machines share.
#SBATCH --job-name=byteback
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
processes=2

srun torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node "$processes" --max-restarts 3 \
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:29500" \
  --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGUSR1 \
  -m byteback train --config "${CONFIG:-configs/cifar10-resnet20.toml}" --threads $((SLURM_CPUS_PER_TASK / processes)) \
  --output-dir "${RUN:-runs/cifar10-resnet20-slurm}" --resume auto &
child=$!
wait "$child"
code=$?
# 138 = 128 + SIGUSR1: the time is over, everything is saved. torchrun itself reports 1 for that.
if [ "$code" -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
