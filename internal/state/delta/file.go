package delta

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
)

// mostMessage is the size of the largest message that is read: it is read at once.
const mostMessage = 1 << 40

// mostHeader is the size of the largest header of a safetensors file, as its own library has it.
const mostHeader = 100_000_000

// file is a safetensors file as a copy of the parameters of a message.
type file struct {
	*os.File
	begins []int64 // of the pieces, in bytes
	memory []byte
}

// tensor is an entry of the header of a safetensors file.
type tensor struct {
	DType   string    `json:"dtype"`
	Shape   []uint64  `json:"shape"`
	Offsets [2]uint64 `json:"data_offsets"`
}

// typeNames are the names of element types in safetensors files.
var typeNames = map[dtype.Type]string{dtype.BF16: "BF16", dtype.F16: "F16", dtype.F32: "F32"}

// Result is what became of a file.
type Result struct {
	Header
	Had     bool // the file had the parameters after the step already
	Tensors int
	Bytes   int64 // of the parameters
}

// ApplyToFile applies a message to a safetensors file: in full, or not at all. It writes another file beside it and
// renames it at the end, so a process that dies leaves the file as it was, and readers see the old or the new one.
func ApplyToFile(message, path string) (r Result, err error) {
	data, err := files.Read(message, mostMessage)
	if err != nil {
		return r, fault.File(message).Inputf("%v", errors.Unwrap(err))
	}
	m, err := Read(data)
	if err != nil {
		return r, fault.File(message).Inputf("%v", err)
	}
	original, _, err := files.Open(path)
	if err != nil {
		return r, fault.File(path).Inputf("%v", errors.Unwrap(err))
	}
	defer original.Close()
	f := &file{File: original}
	if err := f.find(m.Pieces); err != nil {
		return r, fault.File(path).Inputf("%v", err).WithHint("give the file of the model that is trained")
	}
	r.Header, r.Tensors = m.Header, len(m.Pieces)
	for i := range m.Pieces {
		r.Bytes += m.Pieces[i].bytes()
	}
	if r.Had, err = m.Check(f); err != nil || r.Had {
		if err != nil {
			err = fault.File(path).Inputf("%v", err)
		}
		return r, err
	}
	return r, f.replace(m, path)
}

// replace writes the new file.
func (f *file) replace(m *Message, path string) (err error) {
	beside, err := files.NewPending(path)
	if err != nil {
		return err
	}
	defer beside.Cleanup()
	_, err = f.Seek(0, io.SeekStart)
	if err == nil {
		_, err = io.Copy(beside, f.File)
	}
	if err == nil {
		err = m.Apply(&file{File: beside.File, begins: f.begins})
	}
	if err == nil {
		err = files.TakeAccess(beside.File, path)
	}
	if err != nil {
		return err
	}
	return beside.CloseAtomicallyReplace()
}

// find finds the pieces in the file.
func (f *file) find(pieces []Piece) error {
	status, err := f.Stat()
	if err != nil {
		return err
	}
	var length [8]byte
	if _, err := f.ReadAt(length[:], 0); err != nil {
		return errors.New("it is no safetensors file: it has fewer than 8 bytes")
	}
	size := binary.LittleEndian.Uint64(length[:])
	if size > mostHeader || int64(size)+8 > status.Size() {
		return fmt.Errorf("it is no safetensors file: its header would have %d bytes", size)
	}
	text := make([]byte, size)
	if _, err := f.ReadAt(text, 8); err != nil {
		return err
	}
	var header map[string]jsontext.Value
	if err := json.Unmarshal(text, &header); err != nil {
		return fmt.Errorf("its header is no JSON: %w", err)
	}
	data := status.Size() - 8 - int64(size)
	for i := range pieces {
		begin, err := pieces[i].within(header, uint64(data))
		if err != nil {
			return err
		}
		f.begins = append(f.begins, 8+int64(size)+begin)
	}
	return nil
}

// within returns where a piece begins in the data of a file with a header.
func (p *Piece) within(header map[string]jsontext.Value, data uint64) (int64, error) {
	text, ok := header[p.Name]
	if !ok {
		return 0, fmt.Errorf("it has no tensor %q, which the delta changes", p.Name)
	}
	var t tensor
	if err := json.Unmarshal(text, &t); err != nil {
		return 0, fmt.Errorf("tensor %q: %w", p.Name, err)
	}
	if t.DType != typeNames[p.Type] || !slices.Equal(t.Shape, p.Shape) {
		return 0, fmt.Errorf("tensor %q is %s of shape %v: expected %s of shape %v, as the delta has it", p.Name,
			t.DType, t.Shape, typeNames[p.Type], p.Shape)
	}
	begin := t.Offsets[0] + p.First*uint64(p.size())
	if t.Offsets[0] > t.Offsets[1] || t.Offsets[1] > data || begin+uint64(p.bytes()) > t.Offsets[1] {
		return 0, fmt.Errorf("tensor %q has bytes %d to %d of %d: expected %d bytes within them", p.Name, t.Offsets[0],
			t.Offsets[1], data, p.bytes())
	}
	return int64(begin), nil
}

// Words returns the words of a block.
func (f *file) Words(piece int, offset int64, count int) ([]byte, error) {
	f.memory = slices.Grow(f.memory[:0], count)[:count]
	_, err := f.ReadAt(f.memory, f.begins[piece]+offset)
	return f.memory, err
}

// Put replaces the words of a block.
func (f *file) Put(piece int, offset int64, data []byte) error {
	_, err := f.WriteAt(data, f.begins[piece]+offset)
	return err
}
