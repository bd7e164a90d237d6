package snapshot

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
)

// longestText is the longest text that a snapshot may have: metadata of the user, or the name of a C++ template.
const longestText = 1 << 20

// input reads a file piece by piece and knows the offset of every byte.
type input struct {
	source io.Reader
	buffer []byte
	at     int // next byte in buffer
	end    int // of the bytes in buffer
	start  int64
	ended  error // why source gives no more
}

func newInput(source io.Reader) *input {
	return &input{source: source, buffer: make([]byte, 64<<10)}
}

// offset is the place of the next byte in the decompressed file.
func (in *input) offset() int64 { return in.start + int64(in.at) }

// fill makes n bytes available, and reports whether the file has as many.
func (in *input) fill(n int) bool {
	if in.end-in.at >= n {
		return true
	}
	into := in.buffer
	if n > len(into) {
		into = make([]byte, longestText)
	}
	copy(into, in.buffer[in.at:in.end])
	in.buffer = into
	in.start += int64(in.at)
	in.at, in.end = 0, in.end-in.at
	for in.end < n && in.ended == nil {
		var count int
		count, in.ended = in.source.Read(in.buffer[in.end:])
		in.end += count
	}
	return in.end >= n
}

// take returns the next n bytes, at most longestText. They are valid until the next call.
func (in *input) take(n int) []byte {
	if !in.fill(n) {
		if in.ended != io.EOF && !errors.Is(in.ended, io.ErrUnexpectedEOF) {
			panic(&refusal{in.offset(), in.ended.Error(), ""})
		}
		panic(&refusal{in.start + int64(in.end), "the file ends here, expected the rest of the pickle",
			"the file was cut: the program ended while it wrote it, or a copy is unfinished"})
	}
	in.at += n
	return in.buffer[in.at-n : in.at]
}

func (in *input) byte() byte     { return in.take(1)[0] }
func (in *input) uint16() uint16 { return binary.LittleEndian.Uint16(in.take(2)) }
func (in *input) uint32() uint32 { return binary.LittleEndian.Uint32(in.take(4)) }
func (in *input) uint64() uint64 { return binary.LittleEndian.Uint64(in.take(8)) }

// refusal is why a file is no snapshot. The decoder panics with it, and Read recovers.
type refusal struct {
	offset int64
	what   string
	hint   string
}

// in names the file.
func (r *refusal) in(file string) *fault.Input {
	return fault.File(file).Inputf("byte %d: %s", r.offset, r.what).WithHint(r.hint)
}

// budget limits the memory that a file may take while it is read.
type budget struct{ left int64 }

// baseBudget is what every file may take. A file may take its own size beside it.
const baseBudget = 512 << 20

// spend takes bytes off the budget.
func (b *budget) spend(bytes int64) {
	if b.left -= bytes; b.left < 0 {
		panic(&refusal{what: fmt.Sprintf("to read on takes more memory than %v and the size of the file",
			ledger.Bytes(baseBudget)), hint: "no snapshot of PyTorch needs as much"})
	}
}

const (
	chunkBits = 12
	chunkSize = 1 << chunkBits
)

// table is a list that grows without being copied.
type table[T any] struct {
	chunks [][]T
	length int
}

// add appends a row and returns its number.
func (t *table[T]) add(b *budget, row T) uint32 {
	if t.length&(chunkSize-1) == 0 {
		b.spend(chunkSize * sizeOf[T]())
		t.chunks = append(t.chunks, make([]T, chunkSize))
	}
	*t.at(uint32(t.length)) = row
	t.length++
	return uint32(t.length - 1)
}

// at returns a row.
func (t *table[T]) at(n uint32) *T { return &t.chunks[n>>chunkBits][n&(chunkSize-1)] }
