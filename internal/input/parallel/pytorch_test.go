package parallel

import (
	"encoding/json"
	"maps"
	"slices"
	"testing"

	"plimsoll/internal/base/torchtest"
)

// schedules are the schedules that PyTorch has tables of, by its names.
var schedules = map[string]func(ranks, rank, chunks, micros int) []Pass{
	"Interleaved1F1B": func(ranks, rank, chunks, micros int) []Pass {
		return Schedule(degrees(ranks, chunks), int64(rank), micros, micros/max(1, micros/ranks))
	},
	"LoopedBFS": func(_, _, chunks, micros int) []Pass { return LoopedBFS(chunks, micros) },
	"InterleavedZeroBubble": func(ranks, rank, chunks, micros int) []Pass {
		return ZeroBubble(degrees(ranks, chunks), int64(rank), micros, micros/max(1, micros/ranks))
	},
	"ZBVZeroBubble": func(ranks, rank, _, micros int) []Pass { return ZBV(ranks, rank, micros) },
	"DualPipeV":     func(ranks, rank, _, micros int) []Pass { return DualPipeV(ranks, rank, micros) },
}

func degrees(ranks, chunks int) Degrees {
	return Degrees{Pipeline: int64(ranks), Virtual: int64(chunks)}
}

// TestAgainstPyTorch holds the order of passes to the tables of torch.distributed.pipelining.
func TestAgainstPyTorch(t *testing.T) {
	type pipeline struct {
		Name                        string
		Ranks, Rank, Chunks, Micros int
	}
	var list []pipeline
	for _, name := range slices.Sorted(maps.Keys(schedules)) {
		for _, c := range []pipeline{{"", 2, 0, 2, 4}, {"", 2, 1, 2, 6}, {"", 4, 2, 2, 8}, {"", 4, 0, 2, 12},
			{"", 4, 3, 2, 8}, {"", 3, 1, 2, 9}, {"", 4, 1, 2, 24}, {"", 2, 1, 3, 4}, {"", 4, 3, 2, 2},
			{"", 4, 0, 2, 3}} {
			c.Name = name
			vee := name == "ZBVZeroBubble" || name == "DualPipeV"
			if vee && c.Chunks != 2 || name == "DualPipeV" && c.Micros < 2*c.Ranks { // PyTorch refuses these
				continue
			}
			list = append(list, c)
		}
	}
	const script = `
import json, sys
from torch.distributed.pipelining import schedules as s
halves = {"FORWARD": 0, "FULL_BACKWARD": 0, "BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": 2}
def table(c):
    schedule = object.__new__(s.get_schedule_class(c["Name"]))
    ranks, chunks, micros = c["Ranks"], c["Chunks"], c["Micros"]
    schedule._stages, schedule.pp_group_size, schedule._n_microbatches = [None] * chunks, ranks, micros
    schedule.n_local_stages, schedule.num_stages = chunks, ranks * chunks
    schedule.microbatches_per_round = micros // max(1, micros // ranks)
    actions = []
    for a in schedule._calculate_single_rank_operations(c["Rank"]):
        actions += [] if a is None else a.sub_actions or [a]
    return [[int(a.computation_type.name != "FORWARD"), a.stage_index // ranks, a.microbatch_index,
             halves[a.computation_type.name]] for a in actions]
print(json.dumps([table(c) for c in json.loads(sys.argv[1])]))`
	argument, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	want := torchtest.Answer[[][][4]int](t, torchtest.Forked("torch.distributed.pipelining"), "-c", script,
		string(argument))
	for i, c := range list {
		var passes []Pass
		for _, p := range want[i] {
			passes = append(passes, Pass{Backward: p[0] != 0, Chunk: p[1], Micro: p[2], Half: Half(p[3])})
		}
		if got := schedules[c.Name](c.Ranks, c.Rank, c.Chunks, c.Micros); !slices.Equal(got, passes) {
			t.Errorf("%+v:\n%v, PyTorch runs\n%v", c, got, passes)
		}
	}
}
