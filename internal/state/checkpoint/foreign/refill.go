package foreign

import (
	"archive/zip"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/pickle"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// Some checkpoints have much that Plimsoll does not have: arguments, schedules, random states. So the job that shall
// load the state saves a checkpoint itself, a template. The state is written in a copy of it: each number where the
// job's own number was.

// parameterPlace is where a parameter itself is in a template, beside its master weights.
type parameterPlace struct {
	shard.Piece
	at checkpoint.Numbers
}

// checkTemplate refuses a checkpoint that has other parameters.
func checkTemplate(c *checkpoint.Checkpoint, like *checkpoint.Checkpoint, program string) error {
	if c.Algorithm() != kernel.Adam {
		return fault.File(c.Path()).Inputf("it is the state of %v, and %s's is written for Adam and AdamW only",
			c.Algorithm(), program).WithHint("use --to torch")
	}
	for _, want := range like.Pieces() {
		own, ok := c.Piece(want.Name)
		if !ok {
			return c.Absent(like.Path(), want.Name, func(own string) bool { _, ok := like.Piece(own); return ok })
		}
		if !slices.Equal(own.Shape, want.Shape) {
			return fmt.Errorf("parameter %q has the shape %v, and in the checkpoint %v", want.Name, want.Shape,
				own.Shape)
		}
	}
	for _, own := range c.Pieces() {
		if _, ok := like.Piece(own.Name); !ok {
			return fault.File(c.Path()).Inputf("parameter %q is not in the checkpoint that is to be like it", own.Name)
		}
	}
	return nil
}

// refill writes the state into the copies of a template's files: where the ranks have their shards, and the weights.
func refill(
	ctx context.Context, c *checkpoint.Checkpoint, out *overwriter, ranks []*checkpoint.ForeignShard,
	weights []parameterPlace, progress func(bytes int64),
) error {
	put := func(p shard.Piece, role kernel.Role, at checkpoint.Numbers) error {
		to, ok := at.(stored)
		if !ok {
			return fmt.Errorf("parameter %q: its numbers are not in a file as they are", p.Name)
		}
		own, _ := c.Piece(p.Name) // was checked
		own.Range = p.Range
		w := &placeWriter{overwriter: out, to: to, of: storedType(at)}
		return c.Export(ctx, own, role, w, progress)
	}
	for _, f := range ranks {
		for i, p := range f.Pieces {
			roles := []kernel.Role{kernel.MasterRole, kernel.FirstMomentRole, kernel.SecondMomentRole}
			for number, role := range roles {
				if err := put(p, role, f.Places[i][number]); err != nil {
					return err
				}
			}
		}
	}
	for _, w := range weights {
		if err := put(w.Piece, kernel.MasterRole, w.at); err != nil {
			return err
		}
	}
	return nil
}

// copyFolder copies the files of a folder.
func copyFolder(ctx context.Context, to, from string) error {
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return err
		}
		source, _, err := files.Open(filepath.Join(from, e.Name()))
		if err != nil {
			return checkpoint.Cause(filepath.Join(from, e.Name()), "it cannot be copied", errors.Unwrap(err))
		}
		err = writeNew(filepath.Join(to, e.Name()), func(w io.Writer) error {
			_, err := io.Copy(w, source)
			return err
		})
		if err := errors.Join(err, source.Close()); err != nil {
			return err
		}
	}
	return nil
}

// overwriter writes into files of a folder that are complete but for their numbers.
type overwriter struct {
	folder string
	kind   kind
	open   map[string]*os.File // by the names in the folder
}

// file returns the file that is the copy of one elsewhere.
func (o *overwriter) file(path string) (*os.File, error) {
	name := filepath.Base(path)
	if file := o.open[name]; file != nil {
		return file, nil
	}
	if len(o.open) >= checkpoint.MaxOpen {
		if err := o.finish(); err != nil {
			return nil, err
		}
	}
	file, _, err := files.OpenFile(filepath.Join(o.folder, name), os.O_RDWR, 0)
	if err == nil {
		o.open[name] = file
	}
	return file, err
}

// finish brings the files to the disk.
func (o *overwriter) finish() error {
	var err error
	for _, file := range o.open {
		err = errors.Join(err, files.ToDisk(file))
	}
	return errors.Join(err, o.close())
}

func (o *overwriter) close() error {
	var err error
	for name, file := range o.open {
		err = errors.Join(err, file.Close())
		delete(o.open, name)
	}
	return err
}

// placeWriter writes fp32 numbers, one after the other, to their places, rounded to the type that they have there.
type placeWriter struct {
	*overwriter
	to   stored
	next int64 // number
	of   dtype.Type

	rounded []byte // a buffer
}

func (w *placeWriter) Write(b []byte) (int, error) {
	count, text := int64(len(b))/4, b
	if w.of != dtype.F32 {
		w.rounded = roundTo(w.of, w.rounded[:0], b)
		text = w.rounded
	}
	err := w.to.Spans(w.next, count, func(at checkpoint.Location, n int64) error {
		file, err := w.file(at.Path)
		if err != nil {
			return err
		}
		_, err = file.WriteAt(text[:w.of.Size()*n], at.Offset)
		text = text[w.of.Size()*n:]
		return err
	})
	w.next += count
	return len(b), err
}

// storedType returns the type that numbers have in their files.
func storedType(n checkpoint.Numbers) dtype.Type {
	switch n := n.(type) {
	case section:
		return storedType(n.Numbers)
	case grid:
		return n.of
	}
	return dtype.F32
}

// roundTo appends fp32 numbers, rounded to nearest even as PyTorch does. It keeps NaN.
func roundTo(of dtype.Type, halves, b []byte) []byte {
	round := kernel.Float32ToBF16
	if of == dtype.F16 {
		round = kernel.Float32ToFP16
	}
	halves = slices.Grow(halves, len(b)/2)
	for i := 0; i < len(b); i += 4 {
		number := math.Float32frombits(binary.LittleEndian.Uint32(b[i:]))
		halves = binary.LittleEndian.AppendUint16(halves, round(number))
	}
	return halves
}

// stepKeys are the names of steps in the pickle of an optimizer.
var stepKeys = []string{"step", "common_step"}

// setSteps writes the step of an optimizer into the copy of an archive: at each of its places in the document, which
// are tensors or numbers. A number that is not the step before stays: FusedAdam leaves a 0 in its groups.
func (o *overwriter) setSteps(path string, stepsIn func(document any) []any, from, to int64) error {
	numbers := 0
	err := o.change(path, func(a *archive, file *os.File) error {
		document, err := a.document(anyClass)
		if err != nil {
			return err
		}
		a.located = map[string]bool{}
		for _, s := range stepsIn(document) {
			tensor, ok := s.(pickle.Tensor)
			if !ok {
				if s == any(from) || s == any(float64(from)) {
					numbers++
				}
				continue
			}
			at, err := a.locate(tensor, nil)
			if err == nil {
				_, err = file.WriteAt(stepBytes(to), at.Offset)
			}
			if err != nil {
				return err
			}
		}
		return a.sumAgain(file, a.located)
	})
	if err != nil || numbers == 0 {
		return errors.Join(err, o.finish())
	}
	err = o.change(path, func(a *archive, file *os.File) error {
		if err := a.open(); err != nil {
			return err
		}
		text, err := a.entry("data.pkl", maxPickle)
		if err != nil {
			return err
		}
		if text, err = pickle.Splice(text, stepKeys, numbers, from, to); err != nil {
			return o.kind.wrong(path, "%v", err)
		}
		return a.replacePickle(file.Name(), text)
	})
	return errors.Join(err, o.finish())
}

// change opens the copy of an archive.
func (o *overwriter) change(path string, use func(a *archive, file *os.File) error) error {
	file, err := o.file(path)
	if err != nil {
		return err
	}
	info, err := file.Stat()
	if err != nil {
		return err
	}
	return use(&archive{path: file.Name(), data: file, size: info.Size(), kind: o.kind}, file)
}

// Places of checksums in an archive: in the entry's header, in the directory and in the descriptor behind the entry.
const (
	localEntry, localFixed, inHeader            = "PK\x03\x04", 30, 14
	directoryEntry, directoryFixed, inDirectory = "PK\x01\x02", 46, 16
)

// sumAgain sets the checksums of storages in the copy of an archive, whose numbers have changed.
func (o *overwriter) sumAgain(path string, keys map[string]bool) error {
	return o.change(path, func(a *archive, file *os.File) error {
		if err := a.open(); err != nil {
			return err
		}
		return a.sumAgain(file, keys)
	})
}

// sumAgain sets the checksums of storages, whose numbers have changed.
func (a *archive) sumAgain(file *os.File, keys map[string]bool) error {
	places, err := a.sumPlaces()
	if err != nil {
		return err
	}
	for key := range keys {
		f := a.entries["data/"+key]
		if f == nil {
			return a.wrong("it has changed while it was copied: the archive has no data/%s", key)
		}
		begin, err := f.DataOffset()
		if err != nil {
			return err
		}
		size := int64(f.UncompressedSize64)
		sum := crc32.NewIEEE()
		if _, err := io.Copy(sum, io.NewSectionReader(a.data, begin, size)); err != nil {
			return err
		}
		header, err := a.headerOf(f, begin)
		if err != nil {
			return err
		}
		// A descriptor is with or without a signature.
		for _, place := range append(places[f.Name], header+inHeader, begin+size, begin+size+4) {
			var old [4]byte
			if _, err := a.data.ReadAt(old[:], place); err != nil || binary.LittleEndian.Uint32(old[:]) != f.CRC32 {
				continue // there is no checksum here
			}
			if _, err := file.WriteAt(binary.LittleEndian.AppendUint32(nil, sum.Sum32()), a.base+place); err != nil {
				return err
			}
		}
	}
	return nil
}

// maxEntryHeader is far above the size of an entry's header: torch.save pads it to a multiple of 64 bytes.
const maxEntryHeader = 4096

// headerOf returns where the header of an entry begins, whose data begin at a place.
func (a *archive) headerOf(f *zip.File, begin int64) (int64, error) {
	before := make([]byte, min(begin, maxEntryHeader))
	if _, err := a.data.ReadAt(before, begin-int64(len(before))); err != nil {
		return 0, err
	}
	for at := len(before); at >= 0; {
		if at = bytes.LastIndex(before[:at], []byte(localEntry)); at < 0 {
			break
		}
		if own := before[at:]; len(own) >= localFixed {
			name, extra := binary.LittleEndian.Uint16(own[26:]), binary.LittleEndian.Uint16(own[28:])
			if len(own) == localFixed+int(name)+int(extra) && string(own[localFixed:localFixed+int(name)]) == f.Name {
				return begin - int64(len(own)), nil
			}
		}
	}
	return 0, a.wrong("%s has no header", f.Name)
}

// sumPlaces returns the places of each entry's checksums in the directory.
func (a *archive) sumPlaces() (map[string][]int64, error) {
	end := int64(0) // of the last entry: the directory is behind it
	for _, f := range a.zip.File {
		at, err := f.DataOffset()
		if err != nil {
			return nil, err
		}
		end = max(end, at+int64(f.UncompressedSize64))
	}
	if end > a.size {
		return nil, a.wrong("its entries end at %d, and it has %d bytes", end, a.size)
	}
	tail := make([]byte, a.size-end)
	if _, err := a.data.ReadAt(tail, end); err != nil {
		return nil, err
	}
	places := map[string][]int64{}
	at := bytes.Index(tail, []byte(directoryEntry))
	for at >= 0 && at+directoryFixed <= len(tail) && string(tail[at:at+4]) == directoryEntry {
		own := tail[at:]
		name := int(binary.LittleEndian.Uint16(own[28:]))
		extra, comment := int(binary.LittleEndian.Uint16(own[30:])), int(binary.LittleEndian.Uint16(own[32:]))
		if directoryFixed+name <= len(own) {
			text := string(own[directoryFixed : directoryFixed+name])
			places[text] = append(places[text], end+int64(at+inDirectory))
		}
		at += directoryFixed + name + extra + comment
	}
	return places, nil
}

// stored are numbers that lie in files as they are.
type stored interface {
	// Spans calls use for each span of numbers that lie one behind the other.
	Spans(first, count int64, use func(at checkpoint.Location, count int64) error) error
}

// section is numbers from one of them on.
type section struct {
	checkpoint.Numbers
	first int64
}

func (s section) Read(open checkpoint.Opener, first int64, b []byte) error {
	return s.Numbers.Read(open, s.first+first, b)
}

func (s section) Spans(first, count int64, use func(at checkpoint.Location, count int64) error) error {
	p, ok := s.Numbers.(stored)
	if !ok {
		return errors.New("its numbers are not in a file as they are")
	}
	return p.Spans(s.first+first, count, use)
}
