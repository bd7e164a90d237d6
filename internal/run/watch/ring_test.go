//go:build linux

package watch

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"plimsoll/internal/base/samples"
)

// TestRing: a ring has what its recorder has, is renewed before it is large, and can always be read.
func TestRing(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "state", "runs")
	ring, err := NewRing(folder)
	if err != nil {
		t.Fatal(err)
	}
	ring.most = 20 << 10
	r := Begin(Config{Interval: time.Hour, Sampler: &fakeSampler{}, File: ring, Logf: t.Logf})
	largest := int64(0)
	for range 4 * keptSamples {
		r.sample()
		info, err := os.Stat(ring.Path())
		if err != nil {
			t.Fatal(err)
		}
		largest = max(largest, info.Size())
	}
	r.End(samples.End{ExitCode: 1})
	if err := ring.Close(); err != nil {
		t.Fatal(err)
	}
	if limit := 2*ring.renewed.Load() + 20<<10; largest > limit {
		t.Errorf("the ring had %d bytes, expected at most %d", largest, limit)
	}
	file, err := os.Open(ring.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var found, ends int
	cut, err := samples.Read(ring.Path(), file, func(r *samples.Record) error {
		if r.Sample != nil {
			found++
		}
		if r.End != nil {
			ends++
		}
		return nil
	})
	if err != nil || cut || ends != 1 || found < keptSamples {
		t.Errorf("%d samples, %d ends, cut %t, %v; expected at least %d samples and the end", found, ends, cut, err,
			keptSamples)
	}
	for _, path := range []string{folder, ring.Path()} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s: others may use it, or %v", path, err)
		}
	}
	if found := Rings(folder); !slices.Equal(found, []string{ring.Path()}) {
		t.Errorf("the folder has %q", found)
	}
	another := t.TempDir()
	other, err := NewRing(another)
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Remove(); err != nil || len(Rings(another)) > 0 {
		t.Errorf("a removed ring is still there, or %v", err)
	}
}

// TestRingThatCannotBeRenewed: a recorder goes on without its ring, and says nothing, as nobody has asked for it.
func TestRingThatCannotBeRenewed(t *testing.T) {
	ring, err := NewRing(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	ring.most = 0
	if err := os.Mkdir(ring.Path()+".new", 0o700); err != nil {
		t.Fatal(err)
	}
	r := Begin(Config{Interval: time.Hour, Sampler: &fakeSampler{}, File: ring,
		Logf: func(format string, values ...any) { t.Errorf(format, values...) }})
	for range 3 {
		r.sample()
	}
	r.End(samples.End{})
	if got := r.Recording(); len(got) < 5 {
		t.Errorf("%d records in memory, expected the start, four samples and the end", len(got))
	}
	if ring.Close() == nil { // it waits for the last write
		t.Error("a ring that could not be renewed says nothing of it")
	}
}

// TestRingBehind: a file system that stands still takes the recording and not the job.
func TestRingBehind(t *testing.T) {
	ring, err := NewRing(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	stands := make(chan struct{})
	if err := ring.queue(func() error { <-stands; return nil }); err != nil {
		t.Fatal(err)
	}
	r := Begin(Config{Interval: time.Hour, Sampler: &fakeSampler{}, File: ring,
		Logf: func(format string, values ...any) { t.Errorf(format, values...) }})
	for range ringQueue + 10 {
		r.sample()
	}
	r.End(samples.End{})
	if r.file.to != nil {
		t.Error("the recorder still writes to a ring that is behind")
	}
	close(stands)
	if err := ring.Remove(); err != nil {
		t.Error(err)
	}
}

// TestOldRings: only old ones go, the oldest first, and other files stay.
func TestOldRings(t *testing.T) {
	folder, now := t.TempDir(), time.Now()
	var names []string
	for i := range 2 * keptRings {
		name := string(rune('a'+i)) + ringEnd
		names = append(names, name)
		at := now.Add(-time.Duration(i) * 10 * time.Minute) // six of them in the last hour
		path := filepath.Join(folder, name)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, at, at); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(folder, "notes.txt"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := dropOld(folder, now); err != nil {
		t.Fatal(err)
	}
	var left []string
	for _, path := range Rings(folder) {
		left = append(left, filepath.Base(path))
	}
	if !slices.Equal(left, names[:keptRings-1]) {
		t.Errorf("left are %q, expected %q", left, names[:keptRings-1])
	}
	if _, err := os.Stat(filepath.Join(folder, "notes.txt")); err != nil {
		t.Error(err)
	}
	if err := dropOld(folder, now.Add(-24*time.Hour)); err != nil || len(Rings(folder)) != keptRings-1 {
		t.Errorf("rings of the last hour went, or %v", err)
	}
}

// TestSnapshotsGoWithTheirRing: what ranks have written beside a recording that nobody asked for does not outlive it.
func TestSnapshotsGoWithTheirRing(t *testing.T) {
	folder := t.TempDir()
	ring, err := NewRing(folder)
	if err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(folder, "another.jsonl.rank0.pickle")
	for _, name := range []string{ring.Path() + ".rank0.pickle", ring.Path() + ".rank17.pickle", other} {
		if err := os.WriteFile(name, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var ranks []int
	for _, s := range samples.SnapshotsOf(ring.Path()) {
		ranks = append(ranks, s.Rank)
	}
	if !slices.Equal(ranks, []int{0, 17}) {
		t.Errorf("the snapshots are of the ranks %v, expected 0 and 17", ranks)
	}
	if err := ring.Remove(); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(folder); err != nil || len(left) != 1 || left[0].Name() != filepath.Base(other) {
		t.Errorf("left are %v, %v, expected that of another recording alone", left, err)
	}
}
