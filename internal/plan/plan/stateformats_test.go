package plan

import (
	"math"
	"strings"
	"testing"

	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/job"
)

// overlapModel has 1,044,480 elements: a matrix, a smaller one with a column that is
// always important, and a vector.
func overlapModel() *model.Model {
	return &model.Model{Parameters: []model.Parameter{
		{Name: "a", Shape: []int64{1024, 1015}},
		{Name: "b", Shape: []int64{1024, 4}},
		{Name: "c", Shape: []int64{1024}},
		{Name: "tied", Shape: []int64{1024, 1015}, TiedTo: "a"},
	}}
}

func TestBytesOfOverlaps(t *testing.T) {
	for _, c := range []struct {
		name    string
		onCPU   bool
		overlap string
		want    float64 // bytes
	}{
		{"async on a GPU", false, "async", 14 * 1044480},
		{"async", true, "async", 16 * 1044480},
		{"ZenFlow on a GPU", false, "zenflow", 14*1044480 + 14*1024*(101+1+1)},
		{"ZenFlow", true, "zenflow", 16*1044480 + 14*1024*(101+1+1)},
		{"a clipped step behind the backward pass", true, "backward", 15 * 1044480},
	} {
		j := &job.Job{Model: overlapModel(),
			Machine: job.Machine{World: 1, RanksPerNode: 1, OnCPU: c.onCPU}}
		j.Optimizer.Name, j.Clip = "adamw", 1
		found := false
		for _, f := range stateFormats(j, 1044480) {
			if f.Overlap == c.overlap {
				found = true
				if got := float64(f.Bytes); math.Abs(got-c.want) > 0.005*c.want {
					t.Errorf("%s: %v bytes, want %v", c.name, got, c.want)
				}
			}
		}
		if !found {
			t.Errorf("%s: no such format", c.name)
		}
	}
	unclipped := &job.Job{Model: overlapModel(), Machine: job.Machine{World: 1, RanksPerNode: 1}}
	unclipped.Optimizer.Name = "adamw"
	for _, f := range stateFormats(unclipped, 1044480) {
		if f.Overlap == "backward" {
			t.Errorf("%v of a log with which nothing is retracted", f.Bytes)
		}
	}
	several := &job.Job{Model: overlapModel(), Machine: job.Machine{World: 2, RanksPerNode: 2}}
	several.Optimizer.Name = "adamw"
	for _, f := range stateFormats(several, 1044480) {
		if f.Overlap != "" {
			t.Errorf("the client refuses overlap %q with several ranks", f.Overlap)
		}
	}
}

// TestBytesOfRoundedMoments: embeddings and small tensors keep fp32 moments, so int8 takes more than 8 bytes for each.
// A rehearsal of GPT-2 holds 9.910.
func TestBytesOfRoundedMoments(t *testing.T) {
	p := planned(t, job.Request{Model: "gpt2", Sequence: 128, Precision: "bf16", GPUs: 1})
	found := false
	for _, f := range p.StateFormats {
		if f.State == "split" && f.Moments == "int8" {
			found = true
			if math.Abs(f.BytesPerParameter-9.910) > 0.001 || !strings.Contains(f.Why, "embeddings") {
				t.Errorf("%v bytes a parameter, want 9.910: %s", f.BytesPerParameter, f.Why)
			}
		}
	}
	if !found {
		t.Error("no format with int8 moments")
	}
}
