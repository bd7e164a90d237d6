package evidence

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// TestRepeatedErrors: a million lines of an error that nothing explains take no longer than a million others, and the
// last one is a sign all the same.
func TestRepeatedErrors(t *testing.T) {
	var b strings.Builder
	for i := range 100_000 {
		fmt.Fprintf(&b, "RuntimeError: error %d at 0x7f%x: memory allocation failed\n", i, i)
	}
	began := time.Now()
	source := readText(t, "log", []byte(b.String()))
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("%d bytes took %v", b.Len(), took)
	}
	if n := len(source.Signs); n == 0 || source.Signs[n-1].Number != 100_000 {
		t.Errorf("the last line is no sign: %d signs", n)
	}
}

// TestRepeatedFindings: the first findings of a wording are kept, and the last one.
func TestRepeatedFindings(t *testing.T) {
	const lines = 20_000
	var b strings.Builder
	for i := range lines + 1 {
		if i == 0 { // 0 is another wording
			continue
		}
		fmt.Fprintf(&b, "RuntimeError: CUDA error: out of memory %d\n", i)
	}
	source := readText(t, "log", []byte(b.String()))
	n := len(source.Findings)
	if n != mostOfWording+1 || source.Findings[0].Number != 1 || source.Findings[n-1].Number != lines {
		t.Errorf("%d findings of %d lines, the last in line %d", n, lines, source.Findings[n-1].Number)
	}
}

// TestWording: lines of one wording differ in their numbers only, and 0 is not like other numbers.
func TestWording(t *testing.T) {
	same := wordingOf("rank 3: error 17 at 0x7f3a")
	for line, want := range map[string]bool{
		"rank 12: error 4 at 0x7fbb": true, "rank 3: error 0 at 0x7f3a": false, "rank 3: error 17 of 0x7f3a": false,
	} {
		if got := wordingOf([]byte(line)) == same; got != want {
			t.Errorf("%q: %v, expected %v", line, got, want)
		}
	}
}
