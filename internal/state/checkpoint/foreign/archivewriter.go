package foreign

import (
	"archive/zip"
	"bufio"
	"errors"
	"io"
	"maps"
	"math"
	"slices"

	"plimsoll/internal/base/files"
	"plimsoll/internal/base/pickle"
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
func writeArchive(w io.Writer, document func(*pickle.Writer), numbers func(io.Writer) error) error {
	a := newArchiveWriter(w)
	if err := a.begin(pickle.Document(document)); err != nil {
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
func (a *archiveWriter) begin(document []byte) error {
	if err := a.entry("data.pkl", document); err != nil {
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

// replacePickle writes the archive again, with another pickle.
func (a *archive) replacePickle(path string, document []byte) error {
	file, err := files.NewPending(path)
	if err != nil {
		return err
	}
	defer file.Cleanup()
	buffer := bufio.NewWriter(file)
	w := newArchiveWriter(buffer)
	err = w.entry("data.pkl", document)
	for _, name := range slices.Sorted(maps.Keys(a.entries)) {
		if err == nil && name != "data.pkl" {
			var from io.ReadCloser
			if from, err = a.entries[name].Open(); err == nil {
				var to io.Writer
				if to, err = w.create(name); err == nil {
					_, err = io.Copy(to, from)
				}
				err = errors.Join(err, from.Close())
			}
		}
	}
	if err == nil {
		err = w.zip.Close()
	}
	if err == nil {
		err = buffer.Flush()
	}
	if err != nil {
		return err
	}
	return file.CloseAtomicallyReplace()
}
