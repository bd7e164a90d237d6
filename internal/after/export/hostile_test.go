package export

import (
	"bytes"
	"compress/gzip"
	"encoding/csv"
	"io"
	"strings"
	"testing"
	"time"
	"unicode"

	"plimsoll/internal/after/reconcile"
	"plimsoll/internal/base/ledger"
)

// TestHostileNames: names in a plan or a recording act neither on the terminal nor on the spreadsheet of a reader.
func TestHostileNames(t *testing.T) {
	const hostile = "=cmd|' /C calc'!A0\x1b]0;title\x07\u202e\u200b\nfits: all"
	one := ledger.Bytes(1)
	source := &Source{Planned: true, Recorded: true,
		Lines: ledger.Comparison{{Device: ledger.GPU, Phase: hostile, Iteration: hostile, Component: hostile,
			Planned: 1, Measured: &one, Why: hostile}},
		Peaks: []reconcile.Peak{{Device: ledger.GPU, Phase: hostile, Iteration: hostile, Planned: &one,
			Measured: &one}},
		Timeline: &reconcile.Timeline{
			Tracks: []reconcile.Track{{Kind: ledger.GPU, Curves: []reconcile.Curve{{Component: hostile, Title: hostile,
				Points: []reconcile.Point{{Time: time.Second, Bytes: 1}}}}}},
			Spans: []reconcile.Span{{Phase: hostile, To: time.Second}}},
	}
	for _, f := range Formats {
		var text bytes.Buffer
		if err := f.Write(&text, source); err != nil {
			t.Fatal(err)
		}
		written := text.String()
		if f.Name == "pprof" {
			written = unzipped(t, &text)
		}
		if !strings.Contains(written, "title") {
			t.Errorf("%s does not have the name", f.Name)
		}
		for _, hidden := range []string{"\nfits: all", "\x1b]", "\x07\u202e", "\u202e", "\u200b"} {
			if strings.Contains(written, hidden) {
				t.Errorf("%s has %q", f.Name, hidden)
			}
		}
		if f.Name == "csv" {
			checkCells(t, written)
		}
	}
}

func unzipped(t *testing.T, from io.Reader) string {
	reader, err := gzip.NewReader(from)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(reader)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func checkCells(t *testing.T, text string) {
	rows, err := csv.NewReader(strings.NewReader(text)).ReadAll()
	if err != nil || len(rows) < 2 {
		t.Fatalf("%d rows, %v", len(rows), err)
	}
	for _, row := range rows {
		for _, cell := range row {
			if strings.HasPrefix(cell, "=") {
				t.Errorf("a spreadsheet computes the cell %q", cell)
			}
			if strings.ContainsFunc(cell, func(r rune) bool { return unicode.In(r, unicode.Cc, unicode.Cf) }) {
				t.Errorf("the cell %q has hidden characters", cell)
			}
		}
	}
}

// TestNumbersStayNumbers: a negative number is no formula.
func TestNumbersStayNumbers(t *testing.T) {
	var text bytes.Buffer
	rows := safeRows{csv.NewWriter(&text)}
	rows.write("-5", "+1.5e3", "-a", "@b", "plain", "")
	rows.Flush()
	if got, want := text.String(), "-5,+1.5e3,'-a,'@b,plain,\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
