package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"plimsoll/internal/base/pickle"
	"sort"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/files"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// foreign is a shard in files of another program, in fp32. A shard of our own lies in one
// file; the numbers of a foreign one may lie anywhere.
type foreign struct {
	algorithm kernel.Algorithm
	step      int64            // of the parameter with the most
	had       map[string]int64 // steps of each parameter, where the program counts them so; else nil
	pieces    []shard.Piece
	starts    []int64     // element of the shard at which each piece begins
	places    [][]numbers // of the master and the moments of each piece
	elements  int64
}

// location is where numbers begin in a file.
type location struct {
	path   string
	offset int64
}

// after returns the place that is some numbers further on.
func (p location) after(numbers int64) location { return location{p.path, p.offset + 4*numbers} }

// opener opens a file. Whoever has made it closes the file.
type opener func(path string) (io.ReaderAt, error)

// numbers are the numbers of a piece, in files of another program.
type numbers interface {
	// read fills b with fp32 numbers, from one of them on.
	read(open opener, first int64, b []byte) error
}

func (p location) read(open opener, first int64, b []byte) error {
	file, err := open(p.path)
	if err != nil {
		return err
	}
	if _, err := file.ReadAt(b, p.after(first).offset); err != nil {
		return cutShort(p.path, err)
	}
	return nil
}

// zeros are numbers that are in no file.
type zeros struct{}

func (zeros) read(_ opener, _ int64, b []byte) error {
	clear(b)
	return nil
}

// stored are numbers that lie in files as they are.
type stored interface {
	// spans calls use for each span of numbers that lie one behind the other.
	spans(first, count int64, use func(at location, count int64) error) error
}

func (p location) spans(first, count int64, use func(at location, count int64) error) error {
	return use(p.after(first), count)
}

// section is numbers from one of them on.
type section struct {
	numbers
	first int64
}

func (s section) read(open opener, first int64, b []byte) error {
	return s.numbers.read(open, s.first+first, b)
}

func (s section) spans(first, count int64, use func(at location, count int64) error) error {
	p, ok := s.numbers.(stored)
	if !ok {
		return errors.New("its numbers are not in a file as they are")
	}
	return p.spans(s.first+first, count, use)
}

// add adds a piece that has elements: its master weights and its moments.
func (f *foreign) add(p shard.Piece, algorithm kernel.Algorithm, step int64, places []numbers) error {
	if len(f.pieces) > 0 && (algorithm != f.algorithm || step != f.step && f.had == nil) {
		return fmt.Errorf("it has the state of %v at step %d, but earlier parameters have the state of %v at step %d",
			algorithm, step, f.algorithm, f.step)
	}
	if p.Count > shard.MaxElements-f.elements {
		return fmt.Errorf("all parameters together have more than %d elements", int64(shard.MaxElements))
	}
	f.algorithm, f.step = algorithm, max(step, f.step)
	if f.had != nil {
		f.had[p.Name] = step
	}
	f.pieces, f.places = append(f.pieces, p), append(f.places, places)
	f.starts = append(f.starts, f.elements)
	f.elements += p.Count
	return nil
}

// fewerThan returns the parameters that have had fewer steps, and how many.
func (f *foreign) fewerThan(step int64) map[string]int64 {
	fewer := maps.Clone(f.had)
	maps.DeleteFunc(fewer, func(_ string, had int64) bool { return had == step })
	return fewer
}

// read reads elements of a stream of the shard.
func (f *foreign) read(open opener, role kernel.Role, first int64, b []byte) error {
	stream := 0
	if role != kernel.MasterRole {
		stream = 1 + int(role-kernel.FirstMomentRole)
	}
	for i := sort.Search(len(f.starts), func(i int) bool { return f.starts[i] > first }) - 1; len(b) > 0; i++ {
		skip := first - f.starts[i]
		n := min(int64(len(b))/4, f.pieces[i].Count-skip)
		if err := f.places[i][stream].read(open, skip, b[:4*n]); err != nil {
			return err
		}
		first += n
		b = b[4*n:]
	}
	return nil
}

// assembleForeign makes a checkpoint of the shards of a job, one for each rank. The ranks
// have everything in fp32. Ranks without pieces have no state.
func assembleForeign(path, part string, ranks []*foreign) (*Checkpoint, error) {
	own := folder{path: path, world: len(ranks)}
	for _, f := range ranks {
		own.step = max(own.step, f.step)
	}
	var list []savedFile
	var first *foreign
	for rank, f := range ranks {
		if len(f.pieces) == 0 {
			own.without = append(own.without, rank)
			continue
		}
		if first == nil {
			first = f
		}
		if f.algorithm != first.algorithm || f.step != first.step && f.had == nil {
			return nil, fmt.Errorf("rank %d has the state of %v at step %d, but earlier ranks of %v at step %d",
				rank, f.algorithm, f.step, first.algorithm, first.step)
		}
		format := kernel.Format{
			Algorithm: f.algorithm, State: kernel.FP32, Parameter: dtype.BF16, Gradient: dtype.BF16,
		}
		l, err := layoutOfPieces(format, f.pieces)
		if err != nil {
			return nil, err
		}
		s := Shard{Rank: rank, World: len(ranks), Part: part, Format: format, ownSteps: f.fewerThan(own.step)}
		m := newManifest(s, l, own.step, nil, nil)
		list = append(list, &file{path: path, manifest: m, layout: l, foreign: f})
	}
	if first == nil {
		return nil, errors.New("it has no parameters")
	}
	return assembleShards(own, list)
}

// openFiles are the files of other programs that a reader has open, by path.
type openFiles map[string]*os.File

// maxOpen is the number of files that a reader has open at most.
const maxOpen = 16

func (o openFiles) open(path string) (io.ReaderAt, error) {
	if file := o[path]; file != nil {
		return file, nil
	}
	if len(o) >= maxOpen {
		if err := o.close(); err != nil {
			return nil, err
		}
	}
	file, _, err := files.Open(path)
	if err != nil {
		return nil, cause(path, "", errors.Unwrap(err))
	}
	o[path] = file
	return file, nil
}

func (o openFiles) close() error {
	var err error
	for path, file := range o {
		err = errors.Join(err, file.Close())
		delete(o, path)
	}
	return err
}

// withArchive opens an archive that is a file, calls use with its document, and verifies
// the archive's own checksums.
func withArchive(
	ctx context.Context, path string, of kind, admitted func(pickle.Class) bool, progress func(bytes int64),
	use func(a *archive, document any) error,
) error {
	file, info, err := files.Open(path)
	if err != nil {
		return cause(path, "this is no "+of.name, errors.Unwrap(err))
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
