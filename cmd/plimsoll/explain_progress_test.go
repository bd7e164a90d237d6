package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/base/activity"
)

// tally is the progress of activities, in numbers.
type tally struct {
	begun  []int64 // parts of each activity
	parts  int64
	ending int
}

func (c *tally) Begin(_ string, parts int64, _ activity.Unit) { c.begun = append(c.begun, parts) }
func (c *tally) Advance(parts int64)                          { c.parts += parts }
func (c *tally) End()                                         { c.ending++ }

// TestLongReadsShowProgress: all bytes of a long file count, and a short file shows nothing.
func TestLongReadsShowProgress(t *testing.T) {
	folder := t.TempDir()
	long, short := filepath.Join(folder, "long.log"), filepath.Join(folder, "short.log")
	line := strings.Repeat("a", 99) + "\n"
	for name, text := range map[string]string{long: strings.Repeat(line, longRead/len(line)+1), short: line} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	progress := &tally{}
	r := &explainReader{progress: progress}
	for _, name := range []string{long, short} {
		if err := r.argument(name); err != nil {
			t.Fatal(err)
		}
	}
	info, err := os.Stat(long)
	if err != nil {
		t.Fatal(err)
	}
	if len(progress.begun) != 1 || progress.begun[0] != info.Size() || progress.parts != info.Size() ||
		progress.ending != 1 {
		t.Errorf("%+v: expected one activity of %d bytes", progress, info.Size())
	}
}
