//go:build linux

package launch

import (
	"strings"
	"sync"
	"testing"
)

// TestLabelled writes the same bytes in one piece and byte by byte.
func TestLabelled(t *testing.T) {
	for written, want := range map[string]string{
		"one\ntwo\n":                 "# one\n# two\n",
		"\n\n":                       "# \n# \n",
		"no end":                     "# no end\n",
		"one\r\ntwo\r\n":             "# one\n# two\n",
		"\r  0%\r 50%\r100%\ndone\n": "# \u0020 0%\n#  50%\n# 100%\n# done\n", // a progress bar
		"last\r":                     "# last\n",
		"":                           "",
	} {
		for _, pieces := range [][]string{{written}, strings.Split(written, "")} {
			var out strings.Builder
			l := &labelled{lock: new(sync.Mutex), out: &out, label: "# "}
			for _, piece := range pieces {
				if n, err := l.Write([]byte(piece)); n != len(piece) || err != nil {
					t.Fatalf("%q: wrote %d, %v", piece, n, err)
				}
			}
			l.flush()
			if out.String() != want {
				t.Errorf("%q in %d pieces becomes %q, want %q", written, len(pieces), out.String(), want)
			}
		}
	}
}

// TestLineWithoutEndIsCut checks that a line takes limited memory.
func TestLineWithoutEndIsCut(t *testing.T) {
	var out strings.Builder
	l := &labelled{lock: new(sync.Mutex), out: &out, label: "# "}
	_, _ = l.Write(make([]byte, 2*longestLine+5))
	l.flush()
	if lines := strings.Count(out.String(), "\n"); lines != 3 || out.Len() != 2*longestLine+5+3*len("# \n") {
		t.Errorf("%d lines, %d bytes", lines, out.Len())
	}
}

// writes counts writes.
type writes struct {
	strings.Builder
	count int
}

func (w *writes) Write(data []byte) (int, error) {
	w.count++
	return w.Builder.Write(data)
}

// TestLinesOfAReadGoOutTogether checks that the lines of one read take one write, and
// so one system call.
func TestLinesOfAReadGoOutTogether(t *testing.T) {
	var out writes
	l := &labelled{lock: new(sync.Mutex), out: &out, label: "# "}
	for range 3 {
		if _, err := l.Write([]byte(strings.Repeat("line\n", 1000) + "part")); err != nil {
			t.Fatal(err)
		}
	}
	l.flush()
	want := strings.Repeat("# line\n", 1000) + strings.Repeat("# partline\n"+strings.Repeat("# line\n", 999),
		2) + "# part\n"
	if out.String() != want || out.count != 4 {
		t.Errorf("%d writes of %d bytes, want 4 of %d", out.count, out.Len(), len(want))
	}
}
