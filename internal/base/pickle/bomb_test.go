//go:build linux

package pickle

import (
	"encoding/binary"
	"runtime"
	"strings"
	"testing"
)

// taken returns the memory that a function allocates, freed memory included.
func taken(f func()) int64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return int64(after.TotalAlloc - before.TotalAlloc)
}

// TestPickleTakesFewTimesItsLength has pickles that make the most of every byte.
func TestPickleTakesFewTimesItsLength(t *testing.T) {
	const length = 5 << 19 // more than maxStack
	numbered := func(opcode string) string {
		b := []byte{}
		for i := uint32(0); len(b) < length; i++ {
			b = binary.LittleEndian.AppendUint32(append(b, opcode...), i)
		}
		return string(b)
	}
	repeated := func(s string) string { return strings.Repeat(s, length/len(s)) }
	for name, text := range map[string]string{
		"None":               repeated("N"),
		"lists":              repeated("]"),
		"dicts":              repeated("}"),
		"empty tuples":       repeated(")"),
		"nested tuples":      "N" + repeated("\x85"),
		"marks":              repeated("("),
		"nested lists":       repeated("]") + repeated("a"),
		"a list of None":     "]" + repeated("Na"),
		"a list of lists":    "]" + repeated("]a"),
		"a list of a list":   "]]q\x00" + repeated("h\x00a"),
		"a dict":             "}" + repeated("NNs"),
		"dicts of classes":   "}" + repeated("Nccollections\nOrderedDict\n)Rs"),
		"a list of texts":    "]" + repeated("X\x00\x00\x00\x00a"),
		"numbers of objects": "N" + numbered("r"),
		"fetched objects":    "]" + numbered("Nar") + numbered("j"),
		"a text without end": "X\xff\xff\xff\xff" + repeated("x"),
		"objects":            "]" + repeated("ca\nb\n)Ra"),
		"a long integer":     "\x8a\xff" + strings.Repeat("\xff", 255),
	} {
		t.Run(name, func(t *testing.T) {
			var err error
			took := taken(func() { _, err = Read([]byte("\x80\x02"+text+"."), func(Class) bool { return true }) })
			// Slices that grow leave up to five times their length behind.
			if most := int64(5*16*maxStack + 2*(freeBytes+bytesPerByte*len(text))); took > most {
				t.Errorf("%d bytes took %d MiB (%v), expected at most %d", len(text), took>>20, err, most>>20)
			}
		})
	}
}
