#!/bin/sh
# An example of an Epilog of slurm.conf: it runs as root on every node of a job after the last step. It removes the
# prolog's notes of jobs that ended a week ago or earlier.
set -eu
notes=${PLIMSOLL_NOTES:-/var/log/plimsoll}
: "${SLURM_JOB_ID:?this is started by slurmd, which sets SLURM_JOB_ID}"
[ ! -d "$notes" ] || find "$notes" -maxdepth 1 -type f -mtime +7 \( -name '*.json' -o -name '*.err' \) -delete
