package job

import (
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
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
