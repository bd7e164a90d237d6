package checked

import (
	"errors"
	"math/bits"
	"testing"
)

// TestKnownSum holds the checksum to that of other programs: Python's binascii.crc_hqx(bytes, 0xffff).
func TestKnownSum(t *testing.T) {
	for number, want := range map[uint64]uint64{0: 0x0e10, 1: 0x4bb0, 0x313233343536: 0xbcac} {
		if Seal(number) != number<<16|want {
			t.Errorf("the word of %#x is %#x, want %#x", number, Seal(number), number<<16|want)
		}
	}
}

// TestEveryFlipIsFound flips one, two and three bits of words.
func TestEveryFlipIsFound(t *testing.T) {
	for _, number := range []uint64{0, 1, 0x123456789abc, Most} {
		for a := range 64 {
			for b := range a + 1 {
				for c := range b + 1 {
					flips := uint64(1)<<a ^ uint64(1)<<b ^ uint64(1)<<c
					if _, ok := Open(Seal(number) ^ flips); ok {
						t.Fatalf("%#x: %d flips, %#x, are not found", number, bits.OnesCount64(flips), flips)
					}
				}
			}
		}
	}
	if _, ok := Open(0); ok {
		t.Error("memory that nobody has written is a number")
	}
}

// TestDamageDecidesNothing: every way to read a damaged word panics, and the panic becomes an error.
func TestDamageDecidesNothing(t *testing.T) {
	var w Int
	w.Store(-5)
	if w.Load() != -5 {
		t.Errorf("-5 is read as %d", w.Load())
	}
	w.bits.Store(w.bits.Load() ^ 1<<40)
	var s Sum
	s.Write([]byte("abc"))
	for name, read := range map[string]func(){
		"load": func() { w.Load() }, "add": func() { w.Add(1) }, "swap": func() { w.CompareAndSwap(3, 4) },
		"sum": func() { s.Verify([]byte("abd")) },
	} {
		err := func() (err error) {
			defer Catch(&err)
			read()
			return nil
		}()
		if d := (*Damage)(nil); !errors.As(err, &d) {
			t.Errorf("%s: the error is %v", name, err)
		}
	}
	if w.Check() == nil {
		t.Error("the damage is not found")
	}
	if s.Verify([]byte("a"), []byte("bc")); s.Check() != nil {
		t.Error("a sum is damaged")
	}
}
