package job

import (
	"fmt"
	"strings"
	"testing"

	"golang.org/x/tools/txtar"

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
		"export NPROC_PER_NODES=8\nswift sft" + swift: {Request{}, 1, 1,
			"NPROC_PER_NODES is set, and no program reads it: did you mean NPROC_PER_NODE?"},
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

// launches are scripts with the nodes, the ranks of each and what the plan says. SWIFT and TRL stand for programs with
// arguments.
const launches = `
#SBATCH -N 2\n#SBATCH --gpus-per-node=4\nsrun torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE SWIFT
    2x4 nproc_per_node says so
#SBATCH --mem=64G\ntorchrun --nproc_per_node 2 SWIFT  ->  1x2 64.0 GiB of host memory
N=4\nif [ $N -gt 2 ]; then export NPROC_PER_NODE=$((N*2)); fi\nswift sft ARGS  ->  1x8 NPROC_PER_NODE says so
NPROC_PER_NODE=8\nswift sft ARGS  ->  1x1 is set and not exported
if [ -f x ]; then swift sft ARGS; fi  ->  1x1 runs only as the condition [ -f x ] allows
for lr in 1 2; do swift sft ARGS; done  ->  1x1 runs 2 times in a loop
docker run --gpus all -e NPROC_PER_NODE=2 --memory 32g image swift sft ARGS  ->  1x2 32.0 GiB of host memory
trl sft TRL  ->  1x1 starts a rank on every GPU that it sees
CUDA_VISIBLE_DEVICES=0,1 trl sft TRL  ->  1x2 CUDA_VISIBLE_DEVICES says so
trl sft --accelerate_config zero3 --num_processes 4 TRL  ->  1x4 num_processes says so
trl sft --accelerate_config zero2 TRL  ->  1x8 dtype is not given
trl sft --accelerate_config fsdp1 TRL  ->  1x8 dtype is not given
trl sft --accelerate_config single_gpu TRL  ->  1x1 dtype is not given
USE_RAY=1 llamafactory-cli train --stage sft --cutoff_len 128 --model_name_or_path Qwen/Qwen3-0.6B --ray_num_workers 4
    1x4 USE_RAY with ray_num_workers says so
USE_RAY=1 FORCE_TORCHRUN=1 llamafactory-cli train --stage sft --cutoff_len 128 --model_name_or_path Qwen/Qwen3-0.6B
    1x1 USE_RAY says so
llamafactory-cli train --stage sft --cutoff_len 128 --model_name_or_path Qwen/Qwen3-0.6B --ray_num_workers 4
    1x1 --gpus 4 plans so many ranks
accelerate launch --use_deepspeed --zero_stage 2 --mixed_precision bf16 --num_processes 2 sft.py TRL  ->  1x2
`

// TestLaunches reads the ranks of launch lines as their launchers do.
func TestLaunches(t *testing.T) {
	for script, want := range filestest.Cases(launches) {
		j, err := Request{Configs: []string{filestest.InNewFolder(t)("run.sh", filled.Replace(script))}}.Resolve()
		if err != nil {
			t.Errorf("%q: %v", script, err)
			continue
		}
		ranks, says, _ := strings.Cut(want, " ")
		said := strings.Join(j.Assumptions, "\n")
		if got := fmt.Sprintf("%dx%d", j.Nodes, j.RanksPerNode); got != ranks || !strings.Contains(said, says) {
			t.Errorf("%q: %s, want %s and %q in:\n%s", script, got, ranks, says, said)
		}
	}
}

// filled puts programs into scripts.
var filled = strings.NewReplacer("SWIFT", "swift/cli/sft.py "+swiftArguments, "ARGS", swiftArguments, "TRL",
	"--model_name_or_path Qwen/Qwen3-0.6B --dataset_name d --max_length 128")

const swiftArguments = "--model Qwen/Qwen3-0.6B --train_type full --max_length 128"

// asked are scripts that leave ranks to the place where they run, with what is asked for.
const asked = `
torchrun --nproc_per_node $UNSET SWIFT  ->  run.sh:1:10: the script does not say the value of nproc_per_node
torchrun --nproc_per_node gpu SWIFT  ->  torchrun starts a rank on every GPU of a node
torchrun --nproc_per_node 8 --nnodes $N SWIFT  ->  the script does not say the value of nnodes\n  hint: give --nodes
accelerate launch SWIFT  ->  accelerate launch starts a rank on every GPU
deepspeed SWIFT  ->  deepspeed starts a rank on every GPU
--x 1 --y  ->  this is a list of arguments
$LAUNCH SWIFT  ->  $LAUNCH starts a rank on every GPU
NPROC_PER_NODE=$N swift sft ARGS  ->  does not say the value of NPROC_PER_NODE
srun SWIFT  ->  does not say the value of ntasks
accelerate launch --config_file nowhere.yaml --num_processes 2 SWIFT  ->  names nowhere.yaml, which is not here
FORCE_TORCHRUN=1 llamafactory-cli train --stage sft --cutoff_len 128 --model_name_or_path Qwen/Qwen3-0.6B
    llamafactory-cli train starts a rank on every GPU
trl sft --fsdp full_shard TRL  ->  trl sft starts a rank on every GPU of a node
FORCE_TORCHRUN=1 NNODES=2 llamafactory-cli train --stage sft --cutoff_len 128 --model_name_or_path Qwen/Qwen3-0.6B
    llamafactory-cli train starts a rank on every GPU
`

// TestLaunchesAsk: ranks that a script leaves to the place where it runs are asked for, and never guessed. A flag gives
// them.
func TestLaunchesAsk(t *testing.T) {
	for script, want := range filestest.Cases(asked) {
		q := Request{Configs: []string{filestest.InNewFolder(t)("run.sh", filled.Replace(script))}}
		want = strings.ReplaceAll(want, `\n`, "\n")
		if _, err := q.Resolve(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", script, err, want)
		}
		if q.GPUs, q.Nodes = 4, 2; strings.Contains(script, "nowhere") || strings.HasPrefix(script, "--") {
			continue
		}
		if j, err := q.Resolve(); err != nil || j.Nodes != 2 || j.RanksPerNode != 4 {
			t.Errorf("%q with --gpus and --nodes: %v", script, err)
		}
	}
}

// TestLaunchFiles reads the files that a script names or writes: the configuration of the training and of accelerate.
func TestLaunchFiles(t *testing.T) {
	const factory = "model_name_or_path: Qwen/Qwen3-0.6B\nstage: sft\nfinetuning_type: full\ncutoff_len: 256\n" +
		"bf16: true\n"
	const fsdp = "distributed_type: FSDP\nnum_processes: 16\nnum_machines: 2\nmixed_precision: bf16\n" +
		"fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"
	for script, want := range filestest.Cases(`
NPROC_PER_NODE=4 FORCE_TORCHRUN=1 llamafactory-cli train lf.yaml  ->  1x4 of 256
NPROC_PER_NODE=4 llamafactory-cli train lf.yaml cutoff_len=512  ->  1x4 of 512
accelerate launch --config_file fsdp.yaml src/train.py lf.yaml  ->  2x8 of 256
accelerate launch --config_file fsdp.yaml --num_processes 4 --num_machines 1 src/train.py lf.yaml  ->  1x4 of 256
cat > own.yaml <<EOF\nFACTORY\nEOF\nNPROC_PER_NODE=2 llamafactory-cli train own.yaml  ->  1x2 of 256
tune run --nproc_per_node 2 lora --config lora.yaml batch_size=1  ->  1x2 of 512
deepspeed --hostfile hosts src/train.py lf.yaml  ->  3x4 of 256
`) {
		in := filestest.InNewFolder(t)
		in("lf.yaml", factory)
		in("lora.yaml", "model: {_component_: torchtune.models.qwen2_5.lora_qwen2_5_1_5b_instruct, "+
			"lora_attn_modules: [q_proj]}\ntokenizer: {max_seq_len: 512}\ncheckpointer: {}\n"+
			"optimizer: {_component_: torch.optim.AdamW}\nbatch_size: 4\ndtype: bf16\n")
		in("fsdp.yaml", fsdp)
		in("hosts", "# all\na slots=4\nb slots=4\nc slots=4\n")
		j, err := Request{Configs: []string{in("run.sh", strings.ReplaceAll(script, "FACTORY", factory))}}.Resolve()
		if err != nil {
			t.Errorf("%q: %v", script, err)
			continue
		}
		if got := fmt.Sprintf("%dx%d of %d", j.Nodes, j.RanksPerNode, j.Sequence); got != want {
			t.Errorf("%q: %s, want %s", script, got, want)
		}
		if strings.Contains(script, "fsdp.yaml") && j.FSDP == nil {
			t.Errorf("%q: FSDP is %+v", script, j.FSDP)
		}
	}
}

// TestManifests reads jobs of Kubernetes: the command, the pods with GPUs as nodes, and their memory.
func TestManifests(t *testing.T) {
	archive, err := txtar.ParseFile("testdata/manifests.txtar")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range archive.Files {
		kind, want, _ := strings.Cut(strings.TrimSuffix(file.Name, ".yaml"), "-")
		path := filestest.InNewFolder(t)("job.yaml", filled.Replace(string(file.Data)))
		j, err := Request{Configs: []string{path}}.Resolve()
		if err != nil {
			t.Errorf("%s: %v", kind, err)
			continue
		}
		if got := fmt.Sprintf("%dx%d", j.Nodes, j.RanksPerNode); got != want {
			t.Errorf("%s: %s, want %s", kind, got, want)
		}
		if kind == "PyTorchJob" && j.HostMemory != 512*ledger.GiB {
			t.Errorf("%s: host memory is %v", kind, j.HostMemory)
		}
	}
}

// TestSeveralConfigurations: a command that names two configurations trains by neither, and is refused at the second.
func TestSeveralConfigurations(t *testing.T) {
	const file = "stage: sft\ndo_train: true\nfinetuning_type: full\ncutoff_len: 128\n" +
		"model_name_or_path: Qwen/Qwen3-0.6B\noutput_dir: x\n"
	for script, want := range map[string]string{
		"llamafactory-cli train {a,b}.yaml":                      "names b.yaml beside a.yaml",
		"llamafactory-cli train a.yaml b.yaml":                   "names b.yaml beside a.yaml",
		"tune run full_finetune_distributed --config {a,b}.yaml": "names b.yaml beside a.yaml",
		"llamafactory-cli train a.yaml deepspeed=b.json":         "b.json",
		"llamafactory-cli train a.yaml --deepspeed b.json":       "b.json",
		"llamafactory-cli train {a,}.yaml":                       "beside a.yaml",
	} {
		in := filestest.InNewFolder(t)
		in("a.yaml", file)
		_, err := Request{Configs: []string{in("run.sh", script)}}.Resolve()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", script, err, want)
		}
	}
}

// TestMegatronRanks: ranks that a script of Megatron core leaves to where it runs are asked for, and a loop is named.
func TestMegatronRanks(t *testing.T) {
	const arguments = " pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 128 " +
		"--max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 16 --bf16 --vocab-size 1000"
	in := filestest.InNewFolder(t)
	for launch, want := range map[string]string{
		"torchrun --nproc_per_node $G":            "does not say the value of nproc_per_node",
		"torchrun --nproc_per_node 2 --nnodes $N": "does not say the value of nnodes",
		"torchrun --nproc_per_node 8 --nnodes 2":  "",
	} {
		q := Request{Configs: []string{in("run.sh", launch+arguments)}}
		_, err := q.Resolve()
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %v, want %q", launch, err, want)
		}
		if q.GPUs, q.Nodes = 8, 2; want != "" {
			if j, err := q.Resolve(); err != nil || j.World != 16 {
				t.Errorf("%q with --gpus and --nodes: %v", launch, err)
			}
		}
	}
	j, err := Request{Configs: []string{in("run.sh", "for lr in 1 2; do\ntorchrun --nproc_per_node 2"+arguments+
		" --lr $lr\ndone\n")}}.Resolve()
	if err != nil || !strings.Contains(strings.Join(j.Assumptions, "\n"), "runs 2 times in a loop") {
		t.Errorf("a loop: %v, %v", j, err)
	}
}
