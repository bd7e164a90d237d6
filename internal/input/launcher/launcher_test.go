package launcher

import (
	"fmt"
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/input/shell"
)

// said returns what a script's last command says of ranks, as "program by perNode x nodes ?unknown".
func said(t testing.TB, script string) string {
	t.Helper()
	in := Headers(script)
	s, err := shell.Read("run.sh", []byte(script), in.Environment(), nil)
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	l := Read(s.Commands[len(s.Commands)-1], in)
	if l == nil {
		return "nothing"
	}
	count := func(c *Count) string {
		if c == nil {
			return "-"
		}
		return fmt.Sprint(c.Is)
	}
	text := fmt.Sprintf("%s %s %sx%s", l.Program[0].Text, l.By, count(l.PerNode), count(l.Nodes))
	if l.EveryDevice && l.PerNode == nil {
		text += " every"
	}
	for _, u := range l.Unknown {
		text += " ?" + u.Name
	}
	if l.HostMemory != nil {
		text += fmt.Sprintf(" %v", l.HostMemory.Is)
	}
	return text
}

// launchers are commands, with the program, its launcher, and the ranks of a node and the nodes. What is asked for
// stands behind a question mark.
const launchers = `
torchrun --nproc_per_node 8 --nnodes=2 t.py --nproc_per_node 3  ->  t.py torchrun 8x2
torchrun --standalone --nproc-per-node=4 -m a.b --x  ->  a/b.py torchrun 4x-
torchrun t.py  ->  t.py torchrun 1x-
torchrun --nproc_per_node gpu t.py  ->  t.py torchrun -x- every
CUDA_VISIBLE_DEVICES=0,3 torchrun --nproc_per_node=auto t.py  ->  t.py torchrun 2x-
torchrun --nproc_per_node $N --nnodes $M t.py  ->  t.py torchrun -x- ?nnodes ?nproc_per_node
torchrun --nnodes 1:4 --nproc_per_node 2 t.py  ->  t.py torchrun 2x- ?nnodes
torchrun --nnodes 2:2 --nproc_per_node 2 t.py  ->  t.py torchrun 2x2
torchrun $ARGS t.py  ->  t.py torchrun -x- ?$ARGS
PET_NNODES=2 torchrun --nproc_per_node 8 t.py  ->  t.py torchrun 8x2
A=(--nproc_per_node 8); torchrun "${A[@]}" t.py  ->  t.py torchrun 8x-
python -m torch.distributed.run --nproc_per_node 8 t.py  ->  t.py torchrun 8x-
python3.11 -u -m torch.distributed.launch --nproc_per_node=2 t.py  ->  t.py torchrun 2x-
python -W ignore t.py  ->  t.py  -x-
python -m a.b  ->  a/b.py  -x-
python -c 'import torch'  ->  nothing
uv run --isolated --extra fsdp -m a.b --x  ->  a/b.py  -x-
uv run --module a.b x=1  ->  a/b.py  -x-
uv run -m torch.distributed.run --nproc_per_node 2 t.py  ->  t.py torchrun 2x-
uv run --extra x t.py -m 3  ->  t.py  -x-
accelerate launch t.py  ->  t.py accelerate launch -x- every
accelerate launch --multi_gpu --num_processes 16 --num_machines 2 t.py  ->  t.py accelerate launch 8x2
accelerate launch --config_file c.yaml --gpu_ids 0,1 -m a.b  ->  a/b.py accelerate launch 2x-
accelerate launch --num_processes=$N t.py  ->  t.py accelerate launch -x- every ?num_processes
deepspeed t.py --deepspeed ds.json  ->  t.py deepspeed -x- every
deepspeed --num_gpus 4 --num_nodes 2 t.py  ->  t.py deepspeed 4x2
deepspeed --include localhost:0,1,2 t.py  ->  t.py deepspeed 3x-
deepspeed --include=a:0,1@b:0,1 --module a.b  ->  a/b.py deepspeed 2x2
deepspeed --include a:0,1@b:0 t.py  ->  t.py deepspeed -x2 every ?include
deepspeed --num_gpus 8 --num_nodes 2 --exclude b:0 t.py  ->  t.py deepspeed 8x2 ?exclude
mpirun --allow-run-as-root -np 16 -H a:8,b:8 -x A=1 --mca x y python t.py  ->  t.py mpirun 8x2
mpirun -np 16 --map-by ppr:4:node python t.py  ->  t.py mpirun 4x4
mpirun python t.py  ->  t.py mpirun -x- ?np
srun -N2 --ntasks-per-node=8 python t.py  ->  t.py srun 8x2
srun --nodes 2 --ntasks 4 --mem=64G python t.py  ->  t.py srun 2x2 64.0 GiB
srun python t.py  ->  t.py srun -x- ?ntasks
srun -N 2 torchrun --nnodes 2 --nproc_per_node 8 t.py  ->  t.py torchrun 8x2
srun -N 2 bash -c 'torchrun --nnodes $SLURM_NNODES t.py'  ->  t.py torchrun 1x- ?nnodes
$LAUNCHER --x 1 t.py  ->  t.py $LAUNCHER -x- every
torchrun --nproc_per_node 2 $SCRIPT  ->  $SCRIPT torchrun 2x-
tune run --nproc_per_node 4 lora --config x k=v  ->  tune torchrun 4x-
swift sft --x  ->  swift  -x-
`

// TestLaunchers reads the ranks of each launcher.
func TestLaunchers(t *testing.T) {
	for script, want := range filestest.Cases(launchers) {
		if got := said(t, script); got != want {
			t.Errorf("%s: %q, want %q", script, got, want)
		}
	}
}

// TestWrappers looks behind commands that run another one.
func TestWrappers(t *testing.T) {
	const launch = "torchrun --nproc_per_node 2 t.py"
	for _, wrapper := range []string{"nohup", "time", "env A=B", "env -u X A=B", "sudo -E", "nice -n 10", "exec",
		"timeout 3600", "stdbuf -oL", "taskset -c 0-3", "numactl --cpunodebind=0 -m 0",
		"nsys profile -o out --trace=cuda", "py-spy record -o x.svg --", "uv run", "uv run --with peft --no-sync",
		"poetry run", "conda run -n x --no-capture-output", "ray job submit --address=a --working-dir . --",
		"docker run -it --rm --gpus all --shm-size 64g -v /a:/b image:1", "docker exec -it name",
		"apptainer exec --nv -B /a:/b image.sif", "singularity exec --nv --bind /a image",
		"/usr/bin/env", "CUDA_VISIBLE_DEVICES=0,1", "srun --container-image=a"} {
		if got := said(t, wrapper+" "+launch); !strings.HasPrefix(got, "t.py torchrun 2x-") {
			t.Errorf("%s: %q", wrapper, got)
		}
	}
	const container = "docker run --gpus 4 --memory 512g -e HIP_VISIBLE_DEVICES=0,1 -e A=1 image accelerate launch t.py"
	if got := said(t, container); got != "t.py accelerate launch 2x- 512 GiB" {
		t.Errorf("%q", got)
	}
	all := strings.Replace(container, "-e HIP_VISIBLE_DEVICES=0,1 ", "", 1)
	if got := said(t, all); got != "t.py accelerate launch 4x- 512 GiB" {
		t.Errorf("%q", got)
	}
}

// headers are scripts of batch systems.
const headers = `
#SBATCH --nodes=4 # all\n#SBATCH --gres=gpu:a100:8\n#SBATCH --ntasks-per-node=8 --mem=512G\nsrun python t.py
    t.py srun 8x4 512 GiB
#SBATCH -N 4\n#SBATCH --gpus-per-node=8\n##SBATCH --mem=1G\nsrun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 t.py
    t.py torchrun 8x4
#SBATCH -N4\n#SBATCH --gpus-per-node=8\ntorchrun --nnodes 2 --nproc_per_node $SLURM_GPUS_ON_NODE t.py
    t.py torchrun 8x2
#SBATCH -N4\naccelerate launch --num_machines $SLURM_NNODES --num_processes $((SLURM_JOB_NUM_NODES*8)) t.py
    t.py accelerate launch 8x4
#SBATCH -N 4\n#SBATCH --gres=gpu:8\naccelerate launch t.py  ->  t.py accelerate launch 8x-
#SBATCH -N 2\n#SBATCH -n 16\n#SBATCH --gpus=16\nsrun python t.py  ->  t.py srun 8x2
#SBATCH --ntasks-per-node=8\nsrun python t.py  ->  t.py srun 8x- ?nodes
#PBS -l select=2:ncpus=8:ngpus=4:mem=256gb:mpiprocs=4\nmpirun -np 8 python t.py  ->  t.py mpirun 4x2 256 GiB
`

// TestHeaders reads what a batch system gives, and the variables that it sets.
func TestHeaders(t *testing.T) {
	for script, want := range filestest.Cases(headers) {
		if got := said(t, script); got != want {
			t.Errorf("%s: %q, want %q", script, got, want)
		}
	}
}

// TestVariables: the ranks of a program that starts them itself follow from variables that it sees.
func TestVariables(t *testing.T) {
	for script, want := range map[string]string{
		"export NPROC_PER_NODE=4 NNODES=2\nx t": "4x2",
		"NPROC_PER_NODE=4\nx t":                 "hidden",
		"srun bash -c 'NPROC_PER_NODE=8 x t'":   "8x-",
	} {
		in := Headers(script)
		s, err := shell.Read("", []byte(script), nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		l := Read(s.Commands[len(s.Commands)-1], in)
		l.Variables("NPROC_PER_NODE", "NNODES")
		got := "-x-"
		if l.PerNode != nil && l.Nodes != nil {
			got = fmt.Sprintf("%dx%d", l.PerNode.Is, l.Nodes.Is)
		} else if l.PerNode != nil {
			got = fmt.Sprintf("%dx-", l.PerNode.Is)
		}
		if _, hidden := l.Hidden("NPROC_PER_NODE"); hidden {
			got = "hidden"
		}
		if got != want {
			t.Errorf("%s: %s, want %s", script, got, want)
		}
	}
}

// FuzzRead: no command makes the reader fail.
func FuzzRead(f *testing.F) {
	for _, script := range []string{"#SBATCH -N 2\nsrun docker run -e A=1 i torchrun --nnodes 1:2 -m a.b",
		"mpirun -np 2 --mca a b x", "accelerate launch --num_processes 3 $X t.py", "python -m torch.distributed.run",
		"$A -x", "deepspeed -i a:1@b", "env A=1"} {
		f.Add(script)
	}
	f.Fuzz(func(t *testing.T, script string) {
		in := Headers(script)
		s, err := shell.Read("", []byte(script), in.Environment(), nil)
		if err != nil {
			return
		}
		for _, c := range s.Commands {
			if l := Read(c, in); l != nil {
				l.Pass(l.Program)
				l.Variables("A", "B")
				l.OnEveryDevice("x")
			}
		}
	})
}
