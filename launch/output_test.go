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

// TestLineWithoutEndIsCut bounds what is kept of a line.
func TestLineWithoutEndIsCut(t *testing.T) {
	var out strings.Builder
	l := &labelled{lock: new(sync.Mutex), out: &out, label: "# "}
	_, _ = l.Write(make([]byte, 2*longestLine+5))
	l.flush()
	if lines := strings.Count(out.String(), "\n"); lines != 3 || out.Len() != 2*longestLine+5+3*len("# \n") {
		t.Errorf("%d lines, %d bytes", lines, out.Len())
	}
}
