package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"sort"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/files"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// ForeignShard is a shard in files of another program, in fp32. A shard of our own lies in one
// file; the numbers of a foreign one may lie anywhere.
type ForeignShard struct {
	algorithm kernel.Algorithm
	Step      int64            // of the parameter with the most
	Had       map[string]int64 // steps of each parameter, where the program counts them so; else nil
	Pieces    []shard.Piece
	starts    []int64     // element of the shard at which each piece begins
	Places    [][]Numbers // of the master and the moments of each piece
	elements  int64
	Quantized string // the class of moments that the program has quantized
}

// Location is where numbers begin in a file.
type Location struct {
	Path   string
	Offset int64
}

// After returns the place that is some numbers further on.
func (p Location) After(numbers int64) Location { return Location{p.Path, p.Offset + 4*numbers} }

// Opener opens a file. Whoever has made it closes the file.
type Opener func(path string) (io.ReaderAt, error)

// Numbers are the numbers of a piece, in files of another program.
type Numbers interface {
	// Read fills b with fp32 numbers, from one of them on.
	Read(open Opener, first int64, b []byte) error
}

func (p Location) Read(open Opener, first int64, b []byte) error {
	file, err := open(p.Path)
	if err != nil {
		return err
	}
	if _, err := file.ReadAt(b, p.After(first).Offset); err != nil {
		return CutShort(p.Path, err)
	}
	return nil
}

// Zeros are numbers that are in no file.
type Zeros struct{}

func (Zeros) Read(_ Opener, _ int64, b []byte) error {
	clear(b)
	return nil
}

// Spans calls use for each span of numbers that lie one behind the other.
func (p Location) Spans(first, count int64, use func(at Location, count int64) error) error {
	return use(p.After(first), count)
}

// Add adds a piece that has elements: its master weights and its moments.
func (f *ForeignShard) Add(p shard.Piece, algorithm kernel.Algorithm, step int64, places []Numbers) error {
	if len(f.Pieces) > 0 && (algorithm != f.algorithm || step != f.Step && f.Had == nil) {
		return fmt.Errorf("it has the state of %v at step %d, but earlier parameters have the state of %v at step %d",
			algorithm, step, f.algorithm, f.Step)
	}
	if p.Count > shard.MaxElements-f.elements {
		return fmt.Errorf("all parameters together have more than %d elements", int64(shard.MaxElements))
	}
	f.algorithm, f.Step = algorithm, max(step, f.Step)
	if f.Had != nil {
		f.Had[p.Name] = step
	}
	f.Pieces, f.Places = append(f.Pieces, p), append(f.Places, places)
	f.starts = append(f.starts, f.elements)
	f.elements += p.Count
	return nil
}

// fewerThan returns the parameters that have had fewer steps, and how many.
func (f *ForeignShard) fewerThan(step int64) map[string]int64 {
	fewer := maps.Clone(f.Had)
	maps.DeleteFunc(fewer, func(_ string, had int64) bool { return had == step })
	return fewer
}

// read reads elements of a stream of the shard.
func (f *ForeignShard) read(open Opener, role kernel.Role, first int64, b []byte) error {
	stream := 0
	if role != kernel.MasterRole {
		stream = 1 + int(role-kernel.FirstMomentRole)
	}
	for i := sort.Search(len(f.starts), func(i int) bool { return f.starts[i] > first }) - 1; len(b) > 0; i++ {
		skip := first - f.starts[i]
		n := min(int64(len(b))/4, f.Pieces[i].Count-skip)
		if err := f.Places[i][stream].Read(open, skip, b[:4*n]); err != nil {
			return err
		}
		first += n
		b = b[4*n:]
	}
	return nil
}

// AssembleForeign makes a checkpoint of the shards of a job, one for each rank. The ranks
// have everything in fp32. Ranks without pieces have no state.
func AssembleForeign(path, part string, ranks []*ForeignShard) (*Checkpoint, error) {
	own := folder{path: path, world: len(ranks)}
	for _, f := range ranks {
		own.step = max(own.step, f.Step)
	}
	var list []savedFile
	var first *ForeignShard
	for rank, f := range ranks {
		if len(f.Pieces) == 0 {
			own.without = append(own.without, rank)
			continue
		}
		if first == nil {
			first = f
		}
		if f.algorithm != first.algorithm || f.Step != first.Step && f.Had == nil {
			return nil, fmt.Errorf("rank %d has the state of %v at step %d, but earlier ranks of %v at step %d",
				rank, f.algorithm, f.Step, first.algorithm, first.Step)
		}
		format := kernel.Format{
			Algorithm: f.algorithm, State: kernel.FP32, Parameter: dtype.BF16, Gradient: dtype.BF16,
		}
		l, err := layoutOfPieces(format, f.Pieces)
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
	c, err := assembleShards(own, list)
	if err == nil {
		c.quantized = first.Quantized
	}
	return c, err
}

// OpenFiles are the files of other programs that a reader has open, by path.
type OpenFiles map[string]*os.File

// MaxOpen is the number of files that a reader has open at most.
const MaxOpen = 16

func (o OpenFiles) Open(path string) (io.ReaderAt, error) {
	if file := o[path]; file != nil {
		return file, nil
	}
	if len(o) >= MaxOpen {
		if err := o.Close(); err != nil {
			return nil, err
		}
	}
	file, _, err := files.Open(path)
	if err != nil {
		return nil, Cause(path, "", errors.Unwrap(err))
	}
	o[path] = file
	return file, nil
}

func (o OpenFiles) Close() error {
	var err error
	for path, file := range o {
		err = errors.Join(err, file.Close())
		delete(o, path)
	}
	return err
}
