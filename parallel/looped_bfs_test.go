package parallel

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"slices"
	"testing"

	"plimsoll/optim/optimtest"
)

// TestLoopedBFSAgainstPyTorch holds the order of passes to the tables of torch.distributed.pipelining.
func TestLoopedBFSAgainstPyTorch(t *testing.T) {
	if testing.Short() {
		t.Skip("runs Python")
	}
	python := optimtest.Python(t, "torch")
	const script = `
import json, sys
from torch.distributed.pipelining import schedules
ranks, rank, chunks, micros = map(int, sys.argv[1:])
schedule = object.__new__(schedules.ScheduleLoopedBFS)
schedule._stages, schedule.pp_group_size, schedule._n_microbatches = [None] * chunks, ranks, micros
actions = schedule._calculate_single_rank_operations(rank)
print(json.dumps([[a.computation_type.name == "FULL_BACKWARD", a.stage_index // ranks, a.microbatch_index]
                  for a in actions if a is not None]))`
	for _, c := range []struct{ ranks, rank, chunks, micros int }{{2, 0, 2, 4}, {2, 1, 3, 5}, {4, 2, 2, 8}} {
		output, err := exec.Command(python, "-c", script, fmt.Sprint(c.ranks), fmt.Sprint(c.rank), fmt.Sprint(c.chunks),
			fmt.Sprint(c.micros)).Output()
		if err != nil {
			t.Fatal(err)
		}
		var actions [][3]any
		if err := json.Unmarshal(output, &actions); err != nil {
			t.Fatal(err)
		}
		var want []Pass
		for _, a := range actions {
			want = append(want, Pass{a[0].(bool), int(a[1].(float64)), int(a[2].(float64))})
		}
		if got := LoopedBFS(c.chunks, c.micros); !slices.Equal(got, want) {
			t.Errorf("%d chunks, %d micro batches:\n%v, PyTorch runs\n%v", c.chunks, c.micros, got, want)
		}
	}
}
