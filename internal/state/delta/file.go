package delta

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
)

// mostHeader is the size of the largest header of a safetensors file, as its own library has it.
const mostHeader = 100_000_000

// tensorFile is an open safetensors file.
type tensorFile struct {
	*os.File
	path   string // by which the user knows it
	header map[string]jsontext.Value
	begin  int64 // of the data
	data   int64 // its bytes
}

// tensor is an entry of the header of a safetensors file.
type tensor struct {
	DType   string    `json:"dtype"`
	Shape   []uint64  `json:"shape"`
	Offsets [2]uint64 `json:"data_offsets"`
}

// typeNames are the names of element types in safetensors files.
var typeNames = map[dtype.Type]string{dtype.BF16: "BF16", dtype.F16: "F16", dtype.F32: "F32"}

// openTensors opens a safetensors file.
func openTensors(path string, flags int) (f *tensorFile, err error) {
	file, info, err := files.OpenFile(path, flags, 0)
	if err != nil {
		return nil, fault.File(path).Inputf("%v", errors.Unwrap(err))
	}
	f = &tensorFile{File: file, path: path}
	if err = f.readHeader(info.Size()); err != nil {
		return nil, errors.Join(fault.File(path).Inputf("%v", err), file.Close())
	}
	return f, nil
}

func (f *tensorFile) readHeader(total int64) error {
	var length [8]byte
	if _, err := f.ReadAt(length[:], 0); err != nil {
		return errors.New("it is no safetensors file: it has fewer than 8 bytes")
	}
	size := binary.LittleEndian.Uint64(length[:])
	if size > mostHeader || int64(size)+8 > total {
		return fmt.Errorf("it is no safetensors file: its header would have %d bytes", size)
	}
	text := make([]byte, size)
	if _, err := f.ReadAt(text, 8); err != nil {
		return err
	}
	if err := json.Unmarshal(text, &f.header); err != nil {
		return fmt.Errorf("its header is no JSON: %w", err)
	}
	f.begin, f.data = 8+int64(size), total-8-int64(size)
	return nil
}

// find returns where a piece begins in the file.
func (f *tensorFile) find(p *Piece) (int64, error) {
	var t tensor
	if err := json.Unmarshal(f.header[p.Name], &t); err != nil {
		return 0, fmt.Errorf("tensor %q: %w", p.Name, err)
	}
	if t.DType != typeNames[p.Type] || !slices.Equal(t.Shape, p.Shape) {
		return 0, fmt.Errorf("tensor %q is %s of shape %v: expected %s of shape %v, as the delta has it", p.Name,
			t.DType, t.Shape, typeNames[p.Type], p.Shape)
	}
	begin := t.Offsets[0] + p.First*uint64(p.size())
	if t.Offsets[0] > t.Offsets[1] || t.Offsets[1] > uint64(f.data) || begin+uint64(p.bytes()) > t.Offsets[1] {
		return 0, fmt.Errorf("tensor %q has bytes %d to %d of %d: expected %d bytes within them", p.Name, t.Offsets[0],
			t.Offsets[1], f.data, p.bytes())
	}
	return f.begin + int64(begin), nil
}

// model is the safetensors files of a model: one, or those of a folder.
type model struct {
	path   string
	folder bool
	files  []*tensorFile
}

// openModel opens the files of a model for reading, or for writing, too.
func openModel(path string, flags int) (m *model, err error) {
	m = &model{path: path}
	defer func() {
		if err != nil {
			m.close()
		}
	}()
	paths := []string{path}
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		m.folder = true
		if paths, err = inFolder(path, ".safetensors"); err != nil {
			return m, err
		}
		if len(paths) == 0 {
			return m, fault.File(path).Inputf("the folder has no *.safetensors").
				WithHint("give the folder of a model, or one safetensors file")
		}
	}
	for _, path := range paths {
		f, err := openTensors(path, flags)
		if err != nil {
			return m, err
		}
		m.files = append(m.files, f)
	}
	return m, nil
}

// inFolder returns the files in a folder whose names have an ending.
func inFolder(folder, ending string) (paths []string, err error) {
	entries, err := os.ReadDir(folder)
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ending) {
			paths = append(paths, filepath.Join(folder, e.Name()))
		}
	}
	return paths, err
}

// close closes the files.
func (m *model) close() (err error) {
	for _, f := range m.files {
		err = errors.Join(err, f.Close())
	}
	m.files = nil
	return err
}

// copyOf returns the pieces in the files as a copy.
func (m *model) copyOf(pieces []Piece) (*inFiles, error) {
	c := &inFiles{}
	for i := range pieces {
		p := &pieces[i]
		of := slices.IndexFunc(m.files, func(f *tensorFile) bool { return f.header[p.Name] != nil })
		if of < 0 {
			return nil, fault.File(m.path).Inputf("it has no tensor %q, which the delta changes", p.Name).
				WithHint("give the file, or the folder of files, of the model that is trained")
		}
		begin, err := m.files[of].find(p)
		if err != nil {
			return nil, fault.File(m.files[of].path).Inputf("%v", err).WithHint("give the model that is trained")
		}
		c.at = append(c.at, place{m.files[of].File, begin})
	}
	return c, nil
}

// inFiles is a copy in files.
type inFiles struct {
	at     []place // of the pieces
	memory []byte
}

// place is a place in a file.
type place struct {
	*os.File
	begin int64
}

// Words returns the words of a block.
func (c *inFiles) Words(piece int, offset int64, count int) ([]byte, error) {
	c.memory = slices.Grow(c.memory[:0], count)[:count]
	_, err := c.at[piece].ReadAt(c.memory, c.at[piece].begin+offset)
	return c.memory, err
}

// Put replaces the words of a block.
func (c *inFiles) Put(piece int, offset int64, data []byte) error {
	_, err := c.at[piece].WriteAt(data, c.at[piece].begin+offset)
	return err
}

// changed makes a changed model: body changes a copy of it, which takes the name out when it is whole. A file may take
// the place of the one that it is a copy of.
func (m *model) changed(out string, body func(copied string) error) error {
	if m.folder {
		return m.changedFolder(out, body)
	}
	beside, err := files.NewPending(out)
	if err != nil {
		return err
	}
	defer beside.Cleanup()
	if err := copyTo(beside.File, m.files[0].File, m.path); err != nil {
		return err
	}
	if err := body(beside.Name()); err != nil {
		return err
	}
	return beside.CloseAtomicallyReplace()
}

// changedFolder does so for a folder. It copies all files of the folder: those of other kinds belong to the model, too.
func (m *model) changedFolder(out string, body func(copied string) error) (err error) {
	if _, err := os.Lstat(out); err == nil {
		return fault.File(out).Inputf("it exists").WithHint("give a folder that does not exist as --out")
	}
	beside, err := os.MkdirTemp(filepath.Dir(out), "."+filepath.Base(out)+"*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(beside)) }()
	entries, err := os.ReadDir(m.path)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := copyInto(beside, filepath.Join(m.path, e.Name())); err != nil {
			return err
		}
	}
	if err := body(beside); err != nil {
		return err
	}
	if err := files.SyncFolder(beside); err != nil {
		return err
	}
	if err := os.Rename(beside, out); err != nil {
		return err
	}
	return files.SyncFolder(filepath.Dir(out))
}

// copyInto copies a file into a folder: what a link names, and no folder.
func copyInto(folder, path string) error {
	if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() {
		return err
	}
	from, _, err := files.Open(path)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.Create(filepath.Join(folder, filepath.Base(path)))
	if err != nil {
		return err
	}
	return errors.Join(copyTo(to, from, path), to.Close())
}

// copyTo copies a file with its mode.
func copyTo(to, from *os.File, path string) error {
	_, err := from.Seek(0, io.SeekStart)
	if err == nil {
		_, err = io.Copy(to, from)
	}
	if err == nil {
		err = files.TakeAccess(to, path)
	}
	if err == nil {
		err = to.Sync()
	}
	return err
}
