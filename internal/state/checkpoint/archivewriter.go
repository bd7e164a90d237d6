package checkpoint

import (
	"archive/zip"
	"io"
	"math"
	"slices"
)

// archiveWriter writes an archive as torch.save does.
type archiveWriter struct {
	out  *counter
	zip  *zip.Writer
	data int64 // where the data of the last entry begins
}

func newArchiveWriter(w io.Writer) archiveWriter {
	out := &counter{w: w}
	return archiveWriter{out: out, zip: zip.NewWriter(out)}
}

// writeArchive writes an archive with a document and the numbers of the one tensor in it.
// A document without tensors has none.
func writeArchive(w io.Writer, document func(*pickler), numbers func(io.Writer) error) error {
	a := newArchiveWriter(w)
	var p pickler
	p.WriteString(opProto)
	document(&p)
	p.WriteString(opStop)
	if err := a.begin(p.Bytes()); err != nil {
		return err
	}
	if numbers != nil {
		entry, err := a.create("data/0")
		if err == nil {
			err = numbers(entry)
		}
		if err != nil {
			return err
		}
	}
	return a.end()
}

// begin writes the pickle.
func (a *archiveWriter) begin(pickle []byte) error {
	if err := a.entry("data.pkl", pickle); err != nil {
		return err
	}
	return a.entry("byteorder", []byte("little"))
}

func (a *archiveWriter) end() error {
	if err := a.entry("version", []byte("3\n")); err != nil {
		return err
	}
	return a.zip.Close()
}

func (a *archiveWriter) entry(name string, data []byte) error {
	w, err := a.create(name)
	if err == nil {
		_, err = w.Write(data)
	}
	return err
}

// alignment is the alignment of storages, so that torch.load can map them.
const alignment = 64

// create begins an entry whose data is aligned. An extra field pads it, as in the files
// of torch's own writer.
func (a *archiveWriter) create(name string) (io.Writer, error) {
	if err := a.zip.Flush(); err != nil { // so that every byte is counted
		return nil, err
	}
	const localHeader, extraHeader = 30, 4
	header := &zip.FileHeader{Name: "archive/" + name, Method: zip.Store}
	begin := a.out.written + a.descriptor() + localHeader + int64(len(header.Name)) + extraHeader
	padding := -begin & (alignment - 1)
	a.data = begin + padding
	header.Extra = append([]byte{'F', 'B', byte(padding), byte(padding >> 8)},
		slices.Repeat([]byte{'Z'}, int(padding))...)
	return a.zip.CreateHeader(header)
}

// descriptor returns the size of the data descriptor of the last entry: a checksum and
// two sizes. Package zip writes it when the next entry begins.
func (a *archiveWriter) descriptor() int64 {
	switch {
	case a.data == 0:
		return 0
	case a.out.written-a.data >= math.MaxUint32:
		return 24
	}
	return 16
}

// counter counts the bytes that are written.
type counter struct {
	w       io.Writer
	written int64
}

func (c *counter) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	c.written += int64(n)
	return n, err
}
