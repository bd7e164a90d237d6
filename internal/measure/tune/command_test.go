//go:build linux

package tune

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"plimsoll/internal/base/samples"
)

// TestStepsOfTheLowestRank: the ranks of a host need not begin at 0, as other hosts may have the first ones. Later
// marks of a step count for nothing.
func TestStepsOfTheLowestRank(t *testing.T) {
	recording := filepath.Join(t.TempDir(), "run.jsonl")
	file, err := os.Create(recording)
	if err != nil {
		t.Fatal(err)
	}
	w := samples.NewWriter(file)
	if err := w.Write(&samples.Record{Start: &samples.Start{Schema: samples.Schema}}); err != nil {
		t.Fatal(err)
	}
	for _, m := range []struct {
		rank int
		step int64
		at   time.Duration
	}{{9, 1, 0}, {8, 1, 1}, {8, 2, 3}, {9, 2, 4}, {8, 2, 5}, {8, 4, 7}} {
		if err := w.Write(&samples.Record{Time: m.at * time.Second, Mark: &samples.Mark{Rank: m.rank, Step: m.step,
			Source: samples.FromClient}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	found, err := readSteps(recording)
	if want := []float64{2, 2}; err != nil || !slices.Equal(found.steps, want) {
		t.Errorf("%v, %v; want %v", found.steps, err, want)
	}
}

// TestRecordingThatGrows: one that has no line yet has no step, but one with a wrong line is refused.
func TestRecordingThatGrows(t *testing.T) {
	for text, bad := range map[string]bool{"": false, `{"start": {"schema": "`: false, "no record\n": true} {
		recording := filepath.Join(t.TempDir(), "run.jsonl")
		if err := os.WriteFile(recording, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if found, err := readSteps(recording); len(found.steps) > 0 || (err != nil) != bad {
			t.Errorf("%q: %v, %v", text, found.steps, err)
		}
	}
}
