package snapshot

import (
	"bytes"
	"compress/gzip"
	"os"
	"testing"

	"plimsoll/internal/after/snapshot/snapshottest"
	"plimsoll/internal/base/goldentest"
)

// examples are the files that the documentation shows.
var examples = map[string]snapshottest.Training{
	"../../../examples/snapshots/before.pickle.gz": {Layers: 8, Steps: 2, Hidden: 13 << 20, Frames: 6},
	"../../../examples/snapshots/oom.pickle.gz": {Layers: 8, Steps: 3, Hidden: 15 << 20, Frames: 6, OutOfMemory: true,
		Settings: "max_split_size_mb:512"},
}

// TestExamples holds the files of examples/snapshots against their generator.
func TestExamples(t *testing.T) {
	for name, training := range examples {
		file, _ := written(t, training, snapshottest.Python4)
		if *goldentest.Update {
			var b bytes.Buffer
			w := gzip.NewWriter(&b)
			_, _ = w.Write(file)
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(name, b.Bytes(), 0o666); err != nil {
				t.Fatal(err)
			}
		}
		expected, err := Read(name, bytes.NewReader(file), int64(len(file)))
		if err != nil {
			t.Fatal(err)
		}
		got, err := Open(name)
		if err != nil {
			t.Fatal(err)
		}
		if got.events.length != expected.events.length || got.blocks.length != expected.blocks.length {
			t.Errorf("%s is not what its generator writes: run go test ./snapshot -update", name)
		}
	}
}
