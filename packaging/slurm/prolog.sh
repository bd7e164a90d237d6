#!/bin/sh
# An example of a Prolog of slurm.conf: it runs as root on every node of a job before the first step, and a node that it
# fails on is drained. It notes what the job may use of the node, for questions afterwards.
set -eu
notes=${PLIMSOLL_NOTES:-/var/log/plimsoll}
job=${SLURM_JOB_ID:?this is started by slurmd, which sets SLURM_JOB_ID}
mkdir -p "$notes"
# A node is not drained for want of notes.
plimsoll topology --json >"$notes/$job.json" 2>"$notes/$job.err" || true
[ -s "$notes/$job.err" ] || rm -f "$notes/$job.err"
