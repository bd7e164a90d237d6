// Package foreign reads and writes checkpoints of other programs: files of torch.save, and folders of
// torch.distributed.checkpoint, of DeepSpeed and of Megatron. What it reads is a [checkpoint.Checkpoint].
package foreign

import (
	"archive/zip"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/pickle"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// maxPickle is far above the size of a document without numbers.
const maxPickle = 128 << 20

// archive is what torch.save writes: a zip archive with a pickle, and the numbers of
// every storage in an entry of their own.
type archive struct {
	path    string
	data    io.ReaderAt // of the archive, while its file is open
	base    int64       // where it begins in the file
	size    int64
	kind    kind
	zip     *zip.Reader
	entries map[string]*zip.File // by their names behind the prefix of all entries
	located map[string]bool      // keys of the storages whose numbers were located, if it is not nil
}

// kind is a kind of checkpoint of another program.
type kind struct{ name, hint string }

// wrong returns the error for a file that is not of its kind.
func (k kind) wrong(path, format string, arguments ...any) error {
	return fault.File(path).Inputf("this is no %s: %s", k.name, fmt.Sprintf(format, arguments...)).WithHint(k.hint)
}

func (a *archive) wrong(format string, arguments ...any) error {
	return a.kind.wrong(a.path, format, arguments...)
}

func (a *archive) open() error {
	var err error
	if a.zip, err = zip.NewReader(a.data, a.size); err != nil {
		return a.wrong("%v", err)
	}
	if err := a.checkSizes(); err != nil {
		return err
	}
	prefix := ""
	for _, f := range a.zip.File {
		if found, ok := strings.CutSuffix(f.Name, "data.pkl"); ok {
			prefix = found
		}
	}
	a.entries = map[string]*zip.File{}
	for _, f := range a.zip.File {
		if name, ok := strings.CutPrefix(f.Name, prefix); ok {
			a.entries[name] = f
		}
	}
	if order, err := a.entry("byteorder", 16); err == nil && string(order) != "little" {
		return a.wrong("its numbers are %s-endian, expected little-endian", order)
	}
	return nil
}

// document opens the archive and reads its pickle. Objects of the admitted classes may
// be in it.
func (a *archive) document(admitted func(pickle.Class) bool) (any, error) {
	if err := a.open(); err != nil {
		return nil, err
	}
	text, err := a.entry("data.pkl", maxPickle)
	if err != nil {
		return nil, err
	}
	document, err := pickle.Read(text, admitted)
	if err != nil {
		return nil, a.wrong("%v", err)
	}
	return document, nil
}

// checkSizes checks the sizes of the entries against the size of the archive: torch.save
// does not compress, and no two entries share bytes. So a file cannot claim to hold
// more bytes than it has.
func (a *archive) checkSizes() error {
	var sum uint64
	for _, f := range a.zip.File {
		size := f.UncompressedSize64
		if f.Method != zip.Store || size != f.CompressedSize64 {
			return a.wrong("%.60q in the archive is compressed, and torch.save does not compress", f.Name)
		}
		if size > uint64(a.size)-sum {
			return a.wrong("the entries of the archive have more bytes than the file, %d", a.size)
		}
		sum += size
	}
	return nil
}

// entry reads a small entry.
func (a *archive) entry(name string, limit uint64) ([]byte, error) {
	f := a.entries[name]
	if f == nil || f.UncompressedSize64 > limit {
		return nil, a.wrong("the archive has no %s, or one of more than %d bytes", name, limit)
	}
	r, err := f.Open()
	if err != nil {
		return nil, a.wrong("%s: %v", name, err)
	}
	defer r.Close()
	text := make([]byte, f.UncompressedSize64) // no more than the file has: see checkSizes
	if _, err := io.ReadFull(r, text); err != nil {
		return nil, a.wrong("%s: %v", name, err)
	}
	return text, nil
}

// locate returns where the numbers of an fp32 tensor begin in the file. The tensor has a
// shape.
func (a *archive) locate(tensor pickle.Tensor, shape []int64) (checkpoint.Location, error) {
	if tensor.Kind != "FloatStorage" {
		return checkpoint.Location{}, fmt.Errorf("a tensor with a %s, expected fp32 in a FloatStorage", tensor.Kind)
	}
	return a.locateBytes(tensor, shape, 4)
}

// locateBytes is locate for elements of some bytes each.
func (a *archive) locateBytes(tensor pickle.Tensor, shape []int64, width int64) (checkpoint.Location, error) {
	if !slices.Equal(tensor.Shape, shape) || !contiguous(tensor) {
		return checkpoint.Location{}, fmt.Errorf(
			"a tensor of shape %v with strides %v, expected a contiguous one of shape %v",
			tensor.Shape, tensor.Strides, shape)
	}
	count, err := shard.Piece{Shape: shape}.Elements()
	if err != nil {
		return checkpoint.Location{}, err
	}
	f := a.entries["data/"+tensor.Key]
	if f == nil {
		return checkpoint.Location{}, fmt.Errorf("the archive has no data/%s", tensor.Key)
	}
	if size := f.UncompressedSize64; int64(size)/width-tensor.Offset < count {
		return checkpoint.Location{}, fmt.Errorf("data/%s has %d bytes, too few for %d numbers from %d on",
			tensor.Key, size, count, tensor.Offset)
	}
	if a.located != nil {
		a.located[tensor.Key] = true
	}
	at, err := f.DataOffset()
	return checkpoint.Location{Path: a.path, Offset: a.base + at + width*tensor.Offset}, err
}

func contiguous(t pickle.Tensor) bool {
	if len(t.Strides) != len(t.Shape) {
		return false
	}
	want := int64(1)
	for i := len(t.Shape) - 1; i >= 0; i-- {
		if t.Shape[i] != 1 && t.Strides[i] != want {
			return false
		}
		want *= t.Shape[i] // a validated shape does not overflow
	}
	return true
}

// stepOf returns the step of a parameter. SGD and Lion count no steps. If there is a
// moment, the first step is over, which is a special one of SGD.
func (a *archive) stepOf(algorithm kernel.Algorithm, step any) (int64, error) {
	var number float64
	switch s := step.(type) {
	case nil:
		if algorithm != kernel.SGD && algorithm != kernel.Lion {
			return 0, fmt.Errorf("it has no step, which %v needs", algorithm)
		}
		number = 1
	case int64:
		number = float64(s)
	case float64:
		number = s
	case pickle.Tensor:
		at, err := a.locate(s, nil)
		if err != nil {
			return 0, fmt.Errorf("its step is no number: %w", err)
		}
		var bytes [4]byte
		if _, err := a.data.ReadAt(bytes[:], at.Offset-a.base); err != nil {
			return 0, err
		}
		number = float64(math.Float32frombits(binary.LittleEndian.Uint32(bytes[:])))
	default:
		return 0, fmt.Errorf("its step is %s, expected a number", pickle.Shown(step))
	}
	if !(number >= 0 && number <= 1<<53) || number != math.Trunc(number) {
		return 0, fmt.Errorf("its step is %v, expected a whole number", number)
	}
	return int64(number), nil
}

// verify verifies the archive's checksums of all entries.
func (a *archive) verify(ctx context.Context, progress func(bytes int64)) error {
	buffer := make([]byte, min(1<<20, a.size))
	for _, f := range a.zip.File {
		r, err := f.Open()
		if err != nil {
			return a.wrong("%s: %v", f.Name, err)
		}
		for {
			n, err := r.Read(buffer)
			if progress != nil {
				progress(int64(n))
			}
			if err == io.EOF {
				break
			}
			if err != nil {
				return checkpoint.Broken(a.path, "damaged: %s: %v", f.Name, err)
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
		}
		if err := r.Close(); err != nil {
			return err
		}
	}
	return nil
}

// withArchive opens an archive that is a file, calls use with its document, and verifies
// the archive's own checksums.
func withArchive(
	ctx context.Context, path string, of kind, admitted func(pickle.Class) bool, progress func(bytes int64),
	use func(a *archive, document any) error,
) error {
	file, info, err := files.Open(path)
	if err != nil {
		return checkpoint.Cause(path, "this is no "+of.name, errors.Unwrap(err))
	}
	defer file.Close()
	a := &archive{path: path, data: file, size: info.Size(), kind: of}
	document, err := a.document(admitted)
	if err != nil {
		return err
	}
	if err := use(a, document); err != nil {
		return inputOf(of, path, err)
	}
	return a.verify(ctx, progress)
}
