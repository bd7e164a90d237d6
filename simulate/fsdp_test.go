package simulate

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"testing"

	"plimsoll/autograd"
	"plimsoll/dtype"
	"plimsoll/job"
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
		e := &fsdp{simulation: &simulation{Job: &job.Job{Parallel: job.Parallel{Shard: c.ranks},
			ParameterType: dtype.F32,
			FSDP:          &recipe.FSDP{Version: 2}}}}
		p := &autograd.Parameter{Elements: c.rows * 32, Rows: c.rows}
		if all := e.padded(p); all != measured.Gathered || e.shardOf(p, all) != measured.Shard {
			t.Errorf("%d rows among %d ranks: a shard of %d of %d elements, FSDP2 has %d of %d", c.rows, c.ranks,
				e.shardOf(p, all), all, measured.Shard, measured.Gathered)
		}
	}
}
