package snapshot

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"plimsoll/internal/after/snapshot/snapshottest"
	"plimsoll/internal/base/ledger"
)

var styles = map[string]snapshottest.Style{"TorchScript": snapshottest.TorchScript, "protocol 2": snapshottest.Python2,
	"protocol 4": snapshottest.Python4, "protocol 5": snapshottest.Python5}

func written(t testing.TB, x snapshottest.Training, style snapshottest.Style) ([]byte, snapshottest.Totals) {
	t.Helper()
	var b bytes.Buffer
	totals, err := x.Write(&b, style)
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes(), totals
}

var small = snapshottest.Training{Layers: 3, Steps: 4, Hidden: 3 << 20, Frames: 5}

// TestParts reads a history that was written in three parts.
func TestParts(t *testing.T) {
	whole, totals := opened(t, small)
	third := totals.Events / 3
	var paths []string
	for i, last := range []int{3 * third, 2 * third, third} {
		part := small
		part.Cut = last - third
		if i > 0 {
			part.Last = last
		}
		file, _ := written(t, part, snapshottest.Python4)
		paths = append(paths, filepath.Join(t.TempDir(), "part"))
		if err := os.WriteFile(paths[i], file, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s, err := OpenParts(paths...)
	if err != nil {
		t.Fatal(err)
	}
	devices, err := s.Devices()
	if err != nil || len(devices) != 1 || devices[0].Entries() != totals.Events || devices[0].Contradictions != 0 {
		t.Fatalf("%d devices, %v", len(devices), err)
	}
	for i := range totals.Events {
		got, want := devices[0].At(i), whole.At(i)
		if got.Requested != want.Requested || got.Reserved != want.Reserved {
			t.Fatalf("entry %d: %+v, expected %+v", i, got, want)
		}
	}
	at := whole.Peak.Entry
	if got, want := ByComponent(devices[0].Holders(at)), ByComponent(whole.Holders(at)); !slices.Equal(got, want) {
		t.Errorf("at the peak: %v, expected %v", got, want)
	}
}

func TestEveryPicklerIsRead(t *testing.T) {
	for name, style := range styles {
		t.Run(name, func(t *testing.T) {
			file, totals := written(t, small, style)
			s, err := Read(name, bytes.NewReader(file), int64(len(file)))
			if err != nil {
				t.Fatal(err)
			}
			var reserved, allocated ledger.Bytes
			for i := range s.segments {
				reserved += s.segments[i].Size
				for b := range s.Blocks(&s.segments[i]) {
					allocated += b.Requested
				}
			}
			if int64(reserved) != totals.Reserved || int64(allocated) != totals.Allocated {
				t.Errorf("reserved %d, allocated %d, expected %+v", reserved, allocated, totals)
			}
			if n := s.traces[0].last - s.traces[0].first; int(n) != totals.Events || len(s.traces) != 2 {
				t.Errorf("%d events in %d traces, expected %d in 2", n, len(s.traces), totals.Events)
			}
			if !Recognize(file) {
				t.Error("not recognized")
			}
		})
	}
}
