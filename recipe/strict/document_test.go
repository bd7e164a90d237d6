package strict

import (
	"testing"

	"plimsoll/fault"
)

// TestPositions compares positions in a document with those of package fault.
func TestPositions(t *testing.T) {
	for _, text := range []string{"", "\n", "a\n\nb", "é\r\nx\n"} {
		d := &Document{File: "file", Text: []byte(text)}
		for at := int64(-1); at < int64(len(text))+2; at++ {
			if got, want := d.Position(at), fault.At("file", []byte(text), at); got != want {
				t.Errorf("offset %d of %q is at %v, want %v", at, text, got, want)
			}
		}
	}
}
