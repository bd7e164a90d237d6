package explain

import (
	"bytes"
	"math/rand/v2"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/tools/txtar"

	"plimsoll/internal/after/evidence"
)

// TestMutatedLogs: no log, however damaged, breaks an explanation or takes long.
func TestMutatedLogs(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("testdata", "corpus", "*", "*.txtar"))
	if err != nil || len(files) == 0 {
		t.Fatal("there is no corpus", err)
	}
	times := 10_000
	if testing.Short() {
		times = 200
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range times {
		archive, err := txtar.ParseFile(files[random.IntN(len(files))])
		if err != nil {
			t.Fatal(err)
		}
		text := mutated(random, archive.Files[random.IntN(len(archive.Files))].Data)
		began := time.Now()
		if source, err := evidence.Read("log", bytes.NewReader(text)); err == nil {
			if e := Explain(Inputs{Sources: []*evidence.Source{source}}); e.Cause.Text == "" {
				t.Fatalf("nothing is said of %q", text)
			}
		}
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("%d bytes took %v: %.200q", len(text), took, text)
		}
	}
}

// longestMutated is the size of a mutated log, in bytes: repeated lines repeat again.
const longestMutated = 256 << 10

// mutated returns a text with some of its lines lost, moved, repeated, cut or overwritten.
func mutated(random *rand.Rand, text []byte) []byte {
	lines := bytes.SplitAfter(text, []byte("\n"))
	for range 1 + random.IntN(8) {
		at, other := random.IntN(len(lines)), random.IntN(len(lines))
		switch random.IntN(5) {
		case 0:
			lines[at] = nil
		case 1:
			lines[at], lines[other] = lines[other], lines[at]
		case 2:
			lines[at] = bytes.Repeat(lines[other], 1+random.IntN(100))
		case 3:
			lines[at] = lines[at][:random.IntN(len(lines[at])+1)]
		case 4:
			lines[at] = bytes.Clone(lines[at])
			for i := range lines[at] {
				if random.IntN(8) == 0 {
					lines[at][i] = byte(random.IntN(256))
				}
			}
		}
	}
	text = bytes.Join(lines, nil)
	return text[:min(len(text), longestMutated)]
}
