package plan

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"plimsoll/autograd"
	"plimsoll/dtype"
	"plimsoll/optim/optimtest"
	"plimsoll/recipe"
)

// TestPaddingAgainstPyTorch compares the shard and the gathered buffer of a
// parameter with FSDP2's.
func TestPaddingAgainstPyTorch(t *testing.T) {
	if testing.Short() {
		t.Skip("runs Python")
	}
	python := optimtest.Python(t, "torch")
	for _, c := range []struct{ rows, ranks int64 }{{256, 2048}, {256, 256}, {10, 4}, {7, 8}} {
		output, err := exec.Command(python, "../scripts/measure/shard.py", "--rows", fmt.Sprint(c.rows), "--ranks",
			fmt.Sprint(c.ranks)).Output()
		if err != nil {
			t.Fatal(err)
		}
		var measured struct{ Shard, Gathered int64 }
		if err := json.Unmarshal(output, &measured); err != nil {
			t.Fatal(err)
		}
		e := &sharded{simulation: &simulation{Job: &Job{ShardRanks: int(c.ranks), Weights: dtype.F32,
			FSDP: &recipe.FSDP{Version: 2}}}}
		p := &autograd.Parameter{Elements: c.rows * 32, Rows: c.rows}
		if all := e.spread(p); all != measured.Gathered || e.part(all) != measured.Shard {
			t.Errorf("%d rows among %d ranks: a shard of %d of %d elements, FSDP2 has %d of %d", c.rows, c.ranks,
				e.part(all), all, measured.Shard, measured.Gathered)
		}
	}
}

// TestPaddingIsSaid tests the note on models that padding makes larger.
func TestPaddingIsSaid(t *testing.T) {
	for _, c := range []struct {
		q    Request
		want bool
	}{
		{Request{Model: "deepseek-v3", FSDP: "2", GPUs: 8, Nodes: 256}, true},
		{Request{Model: "deepseek-v3", FSDP: "1", GPUs: 8, Nodes: 256}, false},
		{Request{Model: "deepseek-v3", FSDP: "2", GPUs: 8, Nodes: 32}, false},
		{Request{Model: "deepseek-v3", FSDP: "2", GPUs: 8, Nodes: 256, Transformers: "4.57"}, false},
		{Request{Model: "llama-3-8b", FSDP: "2", GPUs: 8, Nodes: 4}, false},
	} {
		j, err := c.q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		said := strings.Join(j.Assumptions, "\n")
		if got := strings.Contains(said, "256 rows of model.layers.3.mlp.experts.gate_up_proj among 2048 ranks") &&
			strings.Contains(said, "dp_shard_size"); got != c.want {
			t.Errorf("%+v: %v\n%s", c.q, got, said)
		}
	}
}
