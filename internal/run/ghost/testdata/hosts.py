"""Prints how many ranks on how many nodes DeepSpeed's launcher would start: the folder of the first argument has hostfiles."""
import os
import sys

from deepspeed.launcher import runner
from plimsoll_stage import launchers

hosts, uneven = (os.path.join(sys.argv[1], name) for name in ("hosts", "uneven"))
for words in [
    "", "--num_gpus 2", "--num_nodes 2 --num_gpus 4", "--include localhost:4,5,6", "--exclude localhost:0",
    f"--hostfile {hosts}", f"--hostfile {hosts} --num_nodes 2", f"--hostfile {hosts} --include a:0,1@b:2,3",
    f"--hostfile {hosts} --exclude c", f"--hostfile {hosts} --exclude c:0", f"--hostfile {uneven}",
    f"--hostfile {uneven} --num_gpus 4", f"--hostfile {hosts} --include d", f"--hostfile {hosts}x",
    f"--hostfile {hosts}x --num_nodes 4 --num_gpus 8", "--num_gpus 2 --include localhost:0", "--autotuning run",
]:  # fmt: skip
    try:
        found = launchers.hosts_of(runner, runner.parse_args([*words.split(), "train.py"]), 4)
    except launchers.Refused as refused:
        found = f"refused: {refused}"
    print(f"<{words.replace(sys.argv[1] + '/', '')}> {found}")
