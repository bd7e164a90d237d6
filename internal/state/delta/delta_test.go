package delta

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
)

// trained is a set of parameters as a trainer has it, and as it was before its last step.
type trained struct {
	pieces   []Piece
	old, now InMemory
}

// train returns parameters of a type and several sizes, of which a share has changed in a step. A part of these moved
// far.
func train(r *rand.Rand, of dtype.Type, share, distant float64) trained {
	var t trained
	for i, elements := range []uint64{1, 4095, 4096, 20_000} {
		p := Piece{Name: fmt.Sprintf("layers.%d", i), Type: of, Shape: []uint64{elements + 7}, First: 3,
			Count: elements}
		old := make([]byte, p.bytes())
		for at := range old {
			old[at] = byte(r.Uint32())
		}
		t.pieces, t.old, t.now = append(t.pieces, p), append(t.old, old), append(t.now, bytes.Clone(old))
		change(r, t.now[len(t.now)-1], p.size(), share, distant)
	}
	return t
}

// change changes a share of words.
func change(r *rand.Rand, data []byte, size int, share, distant float64) {
	for at := 0; at < len(data); at += size {
		if r.Float64() >= share {
			continue
		}
		now := word(data[at:], size) + 1
		if r.Float64() < 0.5 {
			now -= 2
		}
		if r.Float64() < distant {
			now ^= 1 + r.Uint32()%(1<<(8*size-1))
		}
		appendWord(data[:at], now, size)
	}
}

// checksum returns the checksum of some parameters.
func (t *trained) checksum(of InMemory) (sum uint64) {
	for i, p := range t.pieces {
		sum += Checksum(p.Name, p.Type, p.First, of[i])
	}
	return sum
}

// message returns the message of the step.
func (t *trained) message(whole bool) []byte { return t.messageOf(8, whole) }

// messageOf returns the message of the step as one of another number.
func (t *trained) messageOf(step uint64, whole bool) []byte {
	var w Writer
	for i, p := range t.pieces {
		if whole {
			w.Whole(p, t.now[i])
			continue
		}
		w.Changed(p, t.now[i], func(yield func(int, uint32) bool) {
			for at := 0; at < len(t.now[i]); at += p.size() {
				old := word(t.old[i][at:], p.size())
				if old != word(t.now[i][at:], p.size()) && !yield(at/p.size(), old) {
					return
				}
			}
		})
	}
	return w.Message(Header{Whole: whole, From: step - 1, To: step, Before: t.checksum(t.old),
		After: t.checksum(t.now)})
}

func (t *trained) copyOf(of InMemory) (c InMemory) {
	for _, data := range of {
		c = append(c, bytes.Clone(data))
	}
	return c
}

func read(t testing.TB, data []byte) *Message {
	t.Helper()
	m, err := Read(data)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// TestMessagesAreExact applies messages of steps that change from nothing to everything, near and far.
func TestMessagesAreExact(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, of := range types {
		for _, share := range []float64{0, 0.0001, 0.01, 0.1, 0.5, 1} {
			for _, distant := range []float64{0, 0.1, 1} {
				s := train(r, of, share, distant)
				for _, whole := range []bool{false, true} {
					s.checkExact(t, whole, fmt.Sprintf("%v, share %g, far %g, whole %v", of, share, distant, whole))
				}
			}
		}
	}
}

// checkExact applies the message of the step to the parameters before it.
func (s *trained) checkExact(t *testing.T, whole bool, name string) {
	t.Helper()
	m, c := read(t, s.message(whole)), s.copyOf(s.old)
	if has, err := checksumOf(m.Pieces, c); err != nil || has != s.checksum(s.old) {
		t.Fatalf("%s: the checksum is %#x, %v", name, has, err)
	}
	if err := m.Apply(c, s.checksum(s.old)); err != nil {
		t.Fatal(err)
	}
	for i := range c {
		if !bytes.Equal(c[i], s.now[i]) {
			t.Fatalf("%s: parameter %d has other bits", name, i)
		}
	}
	if has, err := checksumOf(m.Pieces, c); has != m.After || err != nil {
		t.Fatalf("%s: after the message the checksum is %#x, %v", name, has, err)
	}
}

// TestOtherParametersAreRefused refuses a copy that lacks a message, and one of which a bit has flipped, anywhere.
func TestOtherParametersAreRefused(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	s := train(r, dtype.BF16, 0.01, 0.1)
	m := read(t, s.message(false))
	for range 200 {
		c := s.copyOf(s.old)
		piece := r.IntN(len(c))
		c[piece][r.IntN(len(c[piece]))] ^= 1 << r.IntN(8)
		has, err := checksumOf(m.Pieces, c)
		if err == nil {
			err = m.Apply(c, has)
		}
		if differs := (*Differs)(nil); !errors.As(err, &differs) {
			t.Fatalf("a copy with another bit: %v", err)
		}
	}
	s.now[0][0] ^= 1 // by other means than a step
	var w Writer
	for i, p := range s.pieces {
		w.Changed(p, s.now[i], func(func(int, uint32) bool) {})
	}
	m = read(t, w.Message(Header{From: 7, To: 8, Before: s.checksum(s.old), After: s.checksum(s.now)}))
	err := m.Apply(s.old, s.checksum(s.old))
	if err == nil || !strings.Contains(err.Error(), "other than by its steps") {
		t.Errorf("a message that lacks a change: %v", err)
	}
}

// TestDamageIsRefused flips every bit of a message, and cuts it everywhere.
func TestDamageIsRefused(t *testing.T) {
	s := train(rand.New(rand.NewPCG(5, 6)), dtype.BF16, 0.001, 0)
	good := s.message(false)
	for at := range good {
		bad := bytes.Clone(good)
		bad[at] ^= 1 << (at % 8)
		if _, err := Read(bad); err == nil {
			t.Fatalf("byte %d of %d was changed, and nobody noticed", at, len(good))
		}
		if _, err := Read(good[:at]); err == nil {
			t.Fatalf("the first %d bytes of %d are a message", at, len(good))
		}
	}
}

// TestMessagesAreNearTheirEntropy compares sizes with the entropy of what they say: which words have changed, and
// whether they became the next number or the one before.
func TestMessagesAreNearTheirEntropy(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	const elements = 1 << 20
	for _, share := range []float64{0.001, 0.01, 0.05, 0.3} {
		p := Piece{Name: "weight", Type: dtype.BF16, Shape: []uint64{elements}, Count: elements}
		s := trained{pieces: []Piece{p}, old: InMemory{make([]byte, 2*elements)}}
		for i := range elements {
			bits := math.Float32bits(float32(r.NormFloat64() * 0.02))
			binary.LittleEndian.PutUint16(s.old[0][2*i:], uint16(bits>>16))
		}
		s.now = s.copyOf(s.old)
		change(r, s.now[0], 2, share, 0)
		entropy := elements * (share - share*math.Log2(share) - (1-share)*math.Log2(1-share)) / 8
		size := float64(len(s.message(false)))
		t.Logf("%4.1f %% changed: %.0f bytes, %.3f of the entropy, %.4f of all words", 100*share, size, size/entropy,
			size/(2*elements))
		if size > 1.12*entropy+600 {
			t.Errorf("%g of the words changed: %.0f bytes, and their entropy is %.0f", share, size, entropy)
		}
	}
}

// safetensors writes a safetensors file with full parameters whose pieces have some words.
func safetensors(t testing.TB, path string, pieces []Piece, data InMemory) {
	t.Helper()
	var body bytes.Buffer
	header := `{"__metadata__":{"format":"pt"}`
	for i, p := range pieces {
		begin := body.Len()
		body.Write(make([]byte, int(p.First)*p.size()))
		body.Write(data[i])
		body.Write(make([]byte, int(p.Shape[0]-p.First-p.Count)*p.size()))
		header += fmt.Sprintf(`,%q:{"dtype":%q,"shape":[%d],"data_offsets":[%d,%d]}`, p.Name, typeNames[p.Type],
			p.Shape[0], begin, body.Len())
	}
	header += "}"
	text := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	if err := os.WriteFile(path, append(append(text, header...), body.Bytes()...), 0o640); err != nil {
		t.Fatal(err)
	}
}

// TestFilesAreReplacedWholly applies messages to safetensors files: the next one, the same one again, one after a gap,
// and one for other tensors.
func TestFilesAreReplacedWholly(t *testing.T) {
	folder := t.TempDir()
	at := func(name string) string { return filepath.Join(folder, name) }
	s := train(rand.New(rand.NewPCG(9, 10)), dtype.BF16, 0.01, 0.1)
	safetensors(t, at("model"), s.pieces, s.old)
	safetensors(t, at("expected"), s.pieces, s.now)
	if err := os.WriteFile(at("message"), s.message(false), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, had := range []bool{false, true} {
		r, err := Apply(Application{Messages: []string{at("message")}, Model: at("model")})
		if err != nil || (r.Applied == 0) != had || r.Step != 8 {
			t.Fatalf("the file had it %v: %+v, %v", had, r, err)
		}
		got, want := readFile(t, at("model")), readFile(t, at("expected"))
		if !bytes.Equal(got, want) {
			t.Fatal("the file has other bytes than one of the new parameters")
		}
	}
	other := train(rand.New(rand.NewPCG(11, 12)), dtype.BF16, 0.01, 0.1)
	safetensors(t, at("other"), other.pieces, other.old)
	safetensors(t, at("less"), s.pieces[1:], s.old[1:])
	for name, want := range map[string]string{"other": "are not those after step 7", "less": "has no tensor",
		"message": "no safetensors file", "nothing": "no such file"} {
		var before []byte
		if name != "nothing" {
			before = readFile(t, at(name))
		}
		_, err := Apply(Application{Messages: []string{at("message")}, Model: at(name)})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: the error is %v, expected one with %q", name, err, want)
		}
		if name != "nothing" && !bytes.Equal(before, readFile(t, at(name))) {
			t.Errorf("%s was changed", name)
		}
	}
	if left, _ := filepath.Glob(at(".*")); len(left) > 0 {
		t.Errorf("files were left: %v", left)
	}
}

func readFile(t testing.TB, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// FuzzRead: a message that is read can be applied to any copy of its size, and says what it will make.
func FuzzRead(f *testing.F) {
	r := rand.New(rand.NewPCG(13, 14))
	for i, share := range []float64{0, 0.01, 0.2, 1} {
		s := train(r, types[i%len(types)], share, 0.1)
		s.pieces, s.old, s.now = s.pieces[:3], s.old[:3], s.now[:3]
		for _, whole := range []bool{false, true} {
			data := s.message(whole)
			f.Add(data[:len(data)-sha256.Size])
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		sum := sha256.Sum256(data)
		m, err := Read(append(bytes.Clone(data), sum[:]...))
		if err != nil {
			return
		}
		var c InMemory
		total := int64(0)
		for i := range m.Pieces {
			if total += m.Pieces[i].bytes(); total > 1<<22 {
				return
			}
			c = append(c, make([]byte, m.Pieces[i].bytes()))
		}
		before, err := checksumOf(m.Pieces, c)
		if err != nil {
			t.Fatal(err)
		}
		moved, err := m.apply(c)
		if err != nil {
			t.Fatal(err)
		}
		if has, _ := checksumOf(m.Pieces, c); has != before+moved {
			t.Fatalf("the copy has the checksum %x, and the message moved it to %x", has, before+moved)
		}
	})
}

// TestChecksumIsPinned holds the checksum to numbers that plimsoll.delta has, too.
func TestChecksumIsPinned(t *testing.T) {
	if sum := Checksum("model.weight", dtype.BF16, 5, []byte{1, 2, 3, 4}); sum != 0xf7886793c1defb4a {
		t.Errorf("the checksum of two bf16 numbers is %#x", sum)
	}
	if sum := Checksum("model.weight", dtype.F32, 0, []byte{1, 2, 3, 4}); sum != 0xeb2b852033fa951a {
		t.Errorf("the checksum of an fp32 number is %#x", sum)
	}
}
