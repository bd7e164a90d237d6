package job

import (
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
)

// TestLaunchLines reads the ranks of a script that starts a training. Flags go before it, and a value that the script
// does not set is named.
func TestLaunchLines(t *testing.T) {
	const swift = " --model Qwen/Qwen3-0.6B --train_type full --max_length 128 > log 2>&1\n"
	const torchrun = "torchrun --nnodes 2 --nproc_per_node 8 "
	const accelerate = "accelerate launch --num_processes 16 --num_machines 2 "
	const trl = " --model_name_or_path Qwen/Qwen3-0.6B --dataset_name d --max_length 128"
	for script, want := range map[string]struct {
		q              Request
		nodes, perNode int
		says           string
	}{
		"NPROC_PER_NODE=8 \\\nswift sft" + swift:                     {Request{}, 1, 8, ":1:1: NPROC_PER_NODE"},
		"export NNODES=2\nexport NPROC_PER_NODE=4\nswift pt" + swift: {Request{}, 2, 4, ":1:8: NNODES"},
		"NPROC_PER_NODE=8 swift sft" + swift + "# --gpus":            {Request{GPUs: 2}, 1, 2, ""},
		"N=4\ntorchrun --nproc-per-node=$N swift/cli/sft.py" + swift: {Request{}, 1, 4, "nproc_per_node"},
		torchrun + "swift/cli/sft.py" + swift:                        {Request{}, 2, 8, "nnodes"},
		"torchrun --nproc_per_node $UNSET swift/cli/sft.py" + swift:  {Request{GPUs: 2}, 1, 2, ""},
		"NPROC_PER_NODE=${N:-8} swift sft" + swift:                   {Request{}, 1, 8, "NPROC_PER_NODE"},
		accelerate + "trl sft" + trl:                                 {Request{}, 2, 8, "num_processes"},
		"trl sft --num_processes 4" + trl:                            {Request{}, 1, 4, "num_processes"},
		"swift sft" + swift:                                          {Request{}, 1, 1, "one GPU: "},
		"#SBATCH -N 2\n#SBATCH --gpus-per-node=4\n#SBATCH --mem=64G\nsrun torchrun --nnodes $SLURM_NNODES " +
			"--nproc_per_node $SLURM_GPUS_ON_NODE swift/cli/sft.py" + swift: {Request{}, 2, 4, "64.0 GiB of host memory"},
		"N=4\nif [ $N -gt 2 ]; then export NPROC_PER_NODE=$((N*2)); fi\nswift sft" + swift: {Request{}, 1, 8, "NPROC"},
		"NPROC_PER_NODE=8\nswift sft" + swift:                                              {Request{}, 1, 1, "is set and not exported"},
		"if [ -f x ]; then swift sft" + swift + "fi":                                       {Request{}, 1, 1, "the condition [ -f x ]"},
		"for lr in 1 2; do swift sft" + swift + "done":                                     {Request{}, 1, 1, "runs 2 times in a loop"},
		"docker run --gpus all -e NPROC_PER_NODE=2 --memory 32g image swift sft" + swift:   {Request{}, 1, 2, "32.0 GiB"},
		"trl sft" + trl:                                             {Request{}, 1, 1, "starts a rank on every GPU that it sees"},
		"CUDA_VISIBLE_DEVICES=0,1 trl sft" + trl:                    {Request{}, 1, 2, "CUDA_VISIBLE_DEVICES"},
		"trl sft --accelerate_config zero3 --num_processes 4" + trl: {Request{}, 1, 4, ""},
		"accelerate launch --use_deepspeed --zero_stage 2 --mixed_precision bf16 --num_processes 2 sft.py" + trl: {Request{}, 1, 2, ""},
		"accelerate launch sft.py" + trl: {Request{GPUs: 4}, 1, 4, ""},
	} {
		q := want.q
		q.Configs = []string{filestest.InNewFolder(t)("run.sh", script)}
		j, err := q.Resolve()
		if err != nil {
			t.Errorf("%q: %v", script, err)
			continue
		}
		if said := strings.Join(j.Assumptions, "\n"); j.Nodes != want.nodes || j.RanksPerNode != want.perNode ||
			!strings.Contains(said, want.says) {
			t.Errorf("%q: %d nodes of %d ranks, want %d of %d and %q in:\n%s", script, j.Nodes, j.RanksPerNode,
				want.nodes, want.perNode, want.says, said)
		}
	}
}

// TestLaunchLinesAsk: ranks that a script leaves to the place where it runs are asked for, and never guessed.
func TestLaunchLinesAsk(t *testing.T) {
	const swift = " --model Qwen/Qwen3-0.6B --train_type full --max_length 128\n"
	for script, want := range map[string]string{
		"torchrun --nproc_per_node $UNSET swift/cli/sft.py":        "run.sh:1:10: the script does not say the value of nproc_per_node",
		"torchrun --nproc_per_node gpu swift/cli/sft.py":           "torchrun starts a rank on every GPU of a node",
		"torchrun --nproc_per_node 8 --nnodes $N swift/cli/sft.py": "nnodes\n  hint: give --nodes",
		"accelerate launch swift/cli/sft.py":                       "accelerate launch starts a rank on every GPU",
		"deepspeed swift/cli/sft.py":                               "deepspeed starts a rank on every GPU",
		"$LAUNCH swift/cli/sft.py":                                 "$LAUNCH starts a rank on every GPU",
		"NPROC_PER_NODE=$N swift sft":                              "does not say the value of NPROC_PER_NODE",
		"srun swift/cli/sft.py":                                    "does not say the value of ntasks",
		"FORCE_TORCHRUN=1 llamafactory-cli train --stage sft --cutoff_len 128 --model_name_or_path Qwen/Qwen3-0.6B #": "llamafactory-cli train starts a rank",
		"accelerate launch --config_file nowhere.yaml --num_processes 2 swift/cli/sft.py":                             "nowhere.yaml, which is not here",
	} {
		q := Request{Configs: []string{filestest.InNewFolder(t)("run.sh", script+swift)}}
		if _, err := q.Resolve(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", script, err, want)
		}
	}
}

// TestLaunchFiles reads the files that a script names or writes: the configuration of the training and of accelerate.
func TestLaunchFiles(t *testing.T) {
	const factory = "model_name_or_path: Qwen/Qwen3-0.6B\nstage: sft\nfinetuning_type: full\ncutoff_len: 256\nbf16: true\n"
	const fsdp = "distributed_type: FSDP\nnum_processes: 16\nnum_machines: 2\nmixed_precision: bf16\n" +
		"fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"
	for script, want := range map[string]struct {
		nodes, perNode, sequence int
	}{
		"NPROC_PER_NODE=4 FORCE_TORCHRUN=1 llamafactory-cli train lf.yaml":                                  {1, 4, 256},
		"NPROC_PER_NODE=4 llamafactory-cli train lf.yaml cutoff_len=512":                                    {1, 4, 512},
		"accelerate launch --config_file fsdp.yaml src/train.py lf.yaml":                                    {2, 8, 256},
		"accelerate launch --config_file fsdp.yaml --num_processes 4 --num_machines 1 src/train.py lf.yaml": {1, 4, 256},
		"cat > own.yaml <<EOF\n" + factory + "EOF\nNPROC_PER_NODE=2 llamafactory-cli train own.yaml":        {1, 2, 256},
		"deepspeed --hostfile hosts src/train.py lf.yaml":                                                   {3, 4, 256},
	} {
		in := filestest.InNewFolder(t)
		in("lf.yaml", factory)
		in("fsdp.yaml", fsdp)
		in("hosts", "# all\na slots=4\nb slots=4\nc slots=4\n")
		j, err := Request{Configs: []string{in("run.sh", script+"\n")}}.Resolve()
		if err != nil {
			t.Errorf("%q: %v", script, err)
			continue
		}
		if j.Nodes != want.nodes || j.RanksPerNode != want.perNode || int(j.Sequence) != want.sequence {
			t.Errorf("%q: %d nodes of %d ranks, %d tokens, want %+v", script, j.Nodes, j.RanksPerNode, j.Sequence, want)
		}
		if strings.Contains(script, "fsdp.yaml") != (j.FSDP != nil) {
			t.Errorf("%q: FSDP is %+v", script, j.FSDP)
		}
	}
}

const trainingJob = `apiVersion: kubeflow.org/v1
kind: PyTorchJob
spec:
  pytorchReplicaSpecs:
    Master: &pod
      replicas: 1
      template:
        spec:
          containers:
          - name: pytorch
            command: [bash, -c]
            args: ["torchrun --nproc_per_node $N swift/cli/sft.py --model Qwen/Qwen3-0.6B --train_type full --max_length 128"]
            env: [{name: N, value: "8"}]
            resources: {limits: {nvidia.com/gpu: 8, memory: 512Gi}}
    Worker:
      replicas: 3
      template:
        spec:
          containers:
          - name: pytorch
            command: [bash, -c]
            args: ["torchrun --nproc_per_node $N swift/cli/sft.py --model Qwen/Qwen3-0.6B --train_type full --max_length 128"]
            env: [{name: N, value: "8"}]
            resources: {limits: {nvidia.com/gpu: 8, memory: 512Gi}}
`

// TestManifests reads jobs of Kubernetes: the command, the pods with GPUs as nodes, and their memory.
func TestManifests(t *testing.T) {
	const swift = "[swift, sft, --model, Qwen/Qwen3-0.6B, --train_type, full, --max_length, \"128\"]"
	for text, want := range map[string][2]int{
		trainingJob: {4, 8},
		"apiVersion: batch/v1\nkind: Job\nspec:\n  template:\n    spec:\n      containers:\n      - command: " + swift +
			"\n        env: [{name: NPROC_PER_NODE, value: \"4\"}]\n        resources: {limits: {nvidia.com/gpu: 4}}\n": {1, 4},
		"apiVersion: kubeflow.org/v2beta1\nkind: MPIJob\nspec:\n  mpiReplicaSpecs:\n    Launcher:\n      replicas: 1\n" +
			"      template:\n        spec:\n          containers:\n          - command: [mpirun, -np, \"16\", python, " +
			"swift/cli/sft.py, --model, Qwen/Qwen3-0.6B, --train_type, full, --max_length, \"128\"]\n    Worker:\n" +
			"      replicas: 2\n      template:\n        spec:\n          containers:\n          - name: w\n            resources: " +
			"{limits: {nvidia.com/gpu: 8}}\n": {2, 8},
		"apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\nspec:\n  replicatedJobs:\n  - replicas: 2\n    template:\n" +
			"      spec:\n        parallelism: 2\n        template:\n          spec:\n            containers:\n            - command: " +
			"[torchrun, --nnodes=4, --nproc_per_node=2, swift/cli/sft.py, --model, Qwen/Qwen3-0.6B, --train_type, full, " +
			"--max_length, \"128\"]\n              resources: {limits: {nvidia.com/gpu: 2}}\n": {4, 2},
	} {
		j, err := Request{Configs: []string{filestest.InNewFolder(t)("job.yaml", text)}}.Resolve()
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if j.Nodes != want[0] || j.RanksPerNode != want[1] {
			t.Errorf("%s: %d nodes of %d ranks, want %v", text, j.Nodes, j.RanksPerNode, want)
		}
		if text == trainingJob && j.HostMemory != 512*ledger.GiB {
			t.Errorf("host memory is %v", j.HostMemory)
		}
	}
}
