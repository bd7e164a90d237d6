package checkpoint

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/files"
	"plimsoll/internal/state/states"
)

// Filling is where the states of a checkpoint are loaded to.
type Filling struct {
	Rank, World int
	Part        string
	Chunks      []states.Chunk
	// Keeps says that the states that are there are worth keeping until every file is verified.
	Keeps bool
	// Begin is called before anything is overwritten. It returns the regions of the states after so many steps, and
	// the table of their numbers.
	Begin func(steps int64) (regions [][]byte, scalars []uint64)
}

// piece is a tensor of a file, and where it goes.
type piece struct {
	file   *statesFile
	tensor *tensorDocument
	to     []byte
}

// Load fills states from the checkpoint. It returns the step and the training document of the same rank and part, or
// else the first document. It finds tensors by their names, so that chunks may be cut otherwise. Shapes and types must
// be the same. Nothing is overwritten where something is missing or differs.
func (c *States) Load(ctx context.Context, into Filling) (step int64, training jsontext.Value, err error) {
	pieces, err := c.pieces(into)
	if err != nil {
		return 0, nil, err
	}
	if into.Keeps {
		if err := c.each(ctx, pieces, nil); err != nil {
			return 0, nil, err
		}
	}
	regions, scalars := into.Begin(c.step)
	at, numbers := 0, make([][]byte, len(scalars))
	for i, chunk := range into.Chunks {
		for _, t := range chunk.Tensors {
			pieces[at].to, at = regions[i][t.Offset:t.Offset+t.Bytes()], at+1
		}
	}
	for i := range numbers {
		numbers[i] = make([]byte, 8)
		pieces[at+i].to = numbers[i][:pieces[at+i].tensor.bytes()]
	}
	if err := c.each(ctx, pieces, nil); err != nil {
		return 0, nil, fmt.Errorf("%w: %w", ErrPartial, err)
	}
	for i := range numbers {
		scalars[i] = binary.LittleEndian.Uint64(numbers[i])
	}
	return c.step, trainingOf(c.files, into.Rank, into.Part), nil
}

// pieces finds the tensors of all chunks, and then the scalars.
func (c *States) pieces(into Filling) ([]piece, error) {
	var pieces []piece
	wanted := map[string]bool{}
	find := func(name string, of dtype.Type, shape []int64) error {
		f, err := c.find(name, into.Rank, into.World, into.Part)
		if err != nil {
			return err
		}
		t := f.byName[name]
		if t.Type != of || !slices.Equal(t.Shape, shape) {
			return c.unsuitable("%q is %v %v there, expected %v %v", name, t.Type, t.Shape, of, shape)
		}
		wanted[name] = true
		pieces = append(pieces, piece{file: f, tensor: t})
		return nil
	}
	for _, chunk := range into.Chunks {
		for _, t := range chunk.Tensors {
			if err := find(t.Title(), t.Type, t.Shape); err != nil {
				return nil, err
			}
		}
	}
	for _, chunk := range into.Chunks {
		for _, s := range chunk.Scalars {
			if err := find(s.Title(), s.Type, nil); err != nil {
				return nil, err
			}
		}
	}
	for _, f := range c.files {
		own := f.manifest.Rank == into.Rank && c.world == into.World || into.World == 1
		for _, t := range f.manifest.Tensors {
			if own && f.manifest.Part == into.Part && !wanted[t.Name] {
				return nil, c.unsuitable("it has a tensor %q, and these states have none", t.Name)
			}
		}
	}
	return pieces, nil
}

// Verify reads every byte of every file and verifies the checksums.
func (c *States) Verify(ctx context.Context, progress func(bytes int64)) error {
	var pieces []piece
	for _, f := range c.files {
		if err := verifyHeader(f.path, f.manifest.Header, f.manifest.HeaderSum); err != nil {
			return err
		}
		for i := range f.manifest.Tensors {
			pieces = append(pieces, piece{file: f, tensor: &f.manifest.Tensors[i]})
		}
	}
	return c.each(ctx, pieces, progress)
}

// Bytes returns the number of bytes that Verify reports as progress.
func (c *States) Bytes() int64 {
	var sum int64
	for _, f := range c.files {
		sum += f.manifest.Bytes - f.manifest.Header
	}
	return sum
}

// each reads tensors with as many threads as keep a disk busy, and verifies them.
func (c *States) each(ctx context.Context, pieces []piece, progress func(bytes int64)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	opened := map[*statesFile]*os.File{}
	for _, p := range pieces {
		if opened[p.file] != nil {
			continue
		}
		file, _, err := files.Open(p.file.path)
		if err != nil {
			return Cause(p.file.path, "", errors.Unwrap(err))
		}
		defer file.Close()
		opened[p.file] = file
	}
	var next atomic.Int64
	var readers sync.WaitGroup
	for range min(4, runtime.GOMAXPROCS(0)) {
		readers.Go(func() {
			memory := make([]byte, 0)
			for i := next.Add(1) - 1; i < int64(len(pieces)) && ctx.Err() == nil; i = next.Add(1) - 1 {
				if err := pieces[i].read(ctx, opened[pieces[i].file], &memory, progress); err != nil {
					cancel(err)
				}
			}
		})
	}
	readers.Wait()
	return context.Cause(ctx)
}

// read reads a tensor block by block and verifies each. Without a place to go, its bytes go to memory.
func (p piece) read(ctx context.Context, file *os.File, memory *[]byte, progress func(bytes int64)) error {
	m := p.file.manifest
	for i, want := range p.tensor.Sums {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		from := int64(i) * m.Block
		n := min(m.Block, p.tensor.bytes()-from)
		var block []byte
		if p.to != nil {
			block = p.to[from : from+n]
		} else {
			*memory = slices.Grow((*memory)[:0], int(n))
			block = (*memory)[:n]
		}
		at := m.Header + p.tensor.offset + from
		if _, err := file.ReadAt(block, at); err != nil {
			return CutShort(p.file.path, err)
		}
		if got := checksum(block); got != want {
			return Broken(p.file.path, "damaged between bytes %d and %d: %q has the checksum %08x, expected %08x", at,
				at+n, p.tensor.Name, got, want)
		}
		if progress != nil {
			progress(n)
		}
	}
	return nil
}
