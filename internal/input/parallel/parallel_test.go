package parallel

import (
	"testing"

	"pgregory.net/rapid"
)

// TestScheduleIsComplete: every micro batch goes forward once through every chunk, and back once after that.
func TestScheduleIsComplete(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		stages := rapid.IntRange(1, 5).Draw(t, "stages")
		d := Degrees{Pipeline: int64(stages), Virtual: 1}
		if stages > 1 {
			d.Virtual = rapid.Int64Range(1, 4).Draw(t, "chunks")
		}
		group := stages + rapid.IntRange(0, 2).Draw(t, "more")
		micros := group * rapid.IntRange(1, 4).Draw(t, "groups")
		stage := rapid.Int64Range(0, int64(stages)-1).Draw(t, "stage")
		forward := map[Pass]bool{}
		for _, p := range Schedule(d, stage, micros, group) {
			before := Pass{Chunk: p.Chunk, Micro: p.Micro}
			switch {
			case !p.Backward && forward[p]:
				t.Fatalf("%v is run twice", p)
			case !p.Backward:
				forward[p] = true
			case !forward[before]:
				t.Fatalf("%v comes before its forward pass", p)
			default:
				forward[before] = false
			}
		}
		for p, under := range forward {
			if under {
				t.Errorf("%v has no backward pass", p)
			}
		}
		if len(forward) != micros*int(d.Virtual) {
			t.Errorf("%d passes, expected %d", len(forward), micros*int(d.Virtual))
		}
	})
}

// TestInFlight counts the micro batches of a stage whose activations live at the same time, as Megatron-LM's schedules
// have them (megatron/core/pipeline_parallel/schedules.py).
func TestInFlight(t *testing.T) {
	for _, c := range []struct {
		stages, chunks, stage int64
		micros, want          int
	}{
		{1, 1, 0, 8, 1}, {4, 1, 0, 8, 4}, {4, 1, 3, 8, 1}, {4, 1, 0, 2, 2},
		{4, 3, 3, 8, 9}, {4, 3, 0, 8, 15}, {2, 2, 1, 4, 3}, {4, 3, 3, 4, 9},
	} {
		most, now := 0, 0
		for _, p := range Schedule(Degrees{Pipeline: c.stages, Virtual: c.chunks}, c.stage, c.micros, int(c.stages)) {
			if now++; p.Backward {
				now -= 2
			}
			most = max(most, now)
		}
		if most != c.want {
			t.Errorf("%+v: %d in flight", c, most)
		}
	}
}

func TestTable(t *testing.T) {
	table := NewTable(2, []int64{1, 2, 3, 4})
	want := Table{{{0, 1, true, false}, {3, 3, false, false}}, {{1, 2, false, false}, {6, 4, false, true}}}
	for stage := range want {
		for i := range want[stage] {
			if table[stage][i] != want[stage][i] {
				t.Errorf("chunk %d of stage %d is %+v, expected %+v", i, stage, table[stage][i], want[stage][i])
			}
		}
	}
}

func TestDegrees(t *testing.T) {
	d := Degrees{Tensor: 2, Pipeline: 2, Virtual: 1, Context: 1, Expert: 4, ExpertTensor: 1}
	got, err := NewDegrees(d, 16)
	if err != nil || got.Data != 4 || got.ExpertData != 2 || got.World() != 16 {
		t.Errorf("%+v, %v", got, err)
	}
	for _, world := range []int64{6, 12} {
		if _, err := NewDegrees(d, world); err == nil {
			t.Errorf("%d ranks are accepted", world)
		}
	}
}
