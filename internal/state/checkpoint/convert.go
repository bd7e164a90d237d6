package checkpoint

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/model"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// Conversion says what to change of a checkpoint. Fields that are nil or 0 change
// nothing.
type Conversion struct {
	State   *kernel.State
	Moments *kernel.MomentType
	Ranks   int
}

// smallTensor is the number of elements below which int8 moments are not worth their
// cost: such a parameter keeps its moments in fp32. So do embeddings.
const smallTensor = 4096

// Convert writes a converted copy of the checkpoint in a directory, and returns its
// folder. Memory does not grow with the state.
func (c *Checkpoint) Convert(
	ctx context.Context, directory string, to Conversion, progress func(bytes int64),
) (path string, err error) {
	if path := filepath.Join(directory, folderOf(c.step)); Exists(path) {
		return "", fault.File(path).Inputf("a checkpoint of this step is here already").WithHint("name another folder")
	}
	shards, err := c.converted(to)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(directory, 0o755); err != nil {
		return "", Cause(directory, "checkpoints cannot be written here", errors.Unwrap(err))
	}
	folder := filepath.Join(directory, SavingPrefix+folderOf(c.step))
	if err := removeLeftovers(folder); err != nil {
		return "", Cause(directory, "the files left here by an earlier conversion cannot be removed", err)
	}
	identity := rand.Text()
	for _, s := range shards {
		s.Identity, s.ownSteps = identity, c.ownSteps
		if err := c.convert(ctx, directory, s, progress); err != nil {
			return "", errors.Join(err, takeBack(folder, identity))
		}
	}
	without := c.without
	if to.Ranks > 0 { // each of the new ranks has a file
		without = nil
	}
	if path, err = Commit(directory, c.step, identity, without...); err != nil {
		return "", errors.Join(err, takeBack(folder, identity))
	}
	return path, nil
}

// takeBack removes the files of a save that becomes no checkpoint. It leaves the files
// of other saves.
func takeBack(folder, identity string) error {
	alone, err := lockFolder(folder, alone)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer alone.Close()
	entries, err := os.ReadDir(folder)
	for _, e := range entries {
		path, m := filepath.Join(folder, e.Name()), &manifest{}
		if !manifestName.MatchString(e.Name()) {
			continue
		}
		if _, damaged := readSealed(path, maxManifest, m); damaged == nil && m.Identity == identity {
			err = errors.Join(err, os.Remove(path), os.Remove(strings.TrimSuffix(path, manifestEnd)+dataSuffix))
		}
	}
	_ = os.Remove(folder) // succeeds if nothing else is in it
	return err
}

// removeLeftovers removes the leftovers of a killed conversion, which may be of other
// ranks and parts. It does not remove files that another process is writing.
func removeLeftovers(folder string) error {
	gone, err := takeLeftovers(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return os.RemoveAll(gone) // its files are closed now: NFS keeps a name of open files
}

// takeLeftovers puts a folder aside in which no process is writing.
func takeLeftovers(folder string) (gone string, err error) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return "", err
	}
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), dataSuffix) {
			file, err := claim(filepath.Join(folder, e.Name()))
			if err != nil {
				return "", err
			}
			defer file.Close()
		}
	}
	return putAside(folder)
}

// converted returns the shards of the new checkpoint.
func (c *Checkpoint) converted(to Conversion) ([]Shard, error) {
	if to.Ranks < 0 || to.Ranks > maxRanks {
		return nil, fault.Inputf("%d ranks, expected 1 to %d", to.Ranks, maxRanks)
	}
	var shards []Shard
	for _, f := range c.files {
		shards = append(shards, Shard{
			Rank: f.manifest.Rank, World: f.manifest.World, Part: f.manifest.Part,
			Format: f.layout.Format, Pieces: slices.Clone(f.layout.pieces),
		})
	}
	if to.Ranks > 0 {
		var err error
		if shards, err = c.recut(shards, to.Ranks); err != nil {
			return nil, err
		}
	}
	for i := range shards {
		if err := to.apply(&shards[i]); err != nil {
			return nil, err
		}
	}
	return shards, nil
}

// apply changes the format of a shard.
func (to Conversion) apply(s *Shard) error {
	if to.State != nil {
		s.Format.State = *to.State
		if *to.State != kernel.FP32 {
			s.Format.Parameter = dtype.BF16 // the upper half of the master
		}
	}
	if to.Moments != nil {
		s.Format.Moments = *to.Moments
		for i, p := range s.Pieces {
			s.Pieces[i].Moments = to.momentsOf(p)
		}
	}
	if err := s.Format.Validate(); err != nil {
		return &fault.Input{What: fmt.Sprintf("part %s cannot be converted", s.Part), Err: err}
	}
	return nil
}

// momentsOf returns the type of a piece's moments.
func (to Conversion) momentsOf(p shard.Piece) kernel.MomentType {
	whole := model.Parameter{Name: p.Name, Shape: p.Shape}
	if *to.Moments == kernel.MomentsInt8 && (whole.Elements() < smallTensor || whole.IsEmbedding()) {
		return kernel.MomentsFP32
	}
	return *to.Moments
}

// recut cuts each part into as many equal ranges as there are ranks. A parameter that
// several ranks or parts hold is held once.
func (c *Checkpoint) recut(shards []Shard, ranks int) ([]Shard, error) {
	var all []Shard
	seen := map[string]bool{}
	for _, part := range c.Parts() {
		var first *Shard
		var pieces []shard.Piece
		var elements int64
		for i, s := range shards {
			if s.Part != part {
				continue
			}
			if first == nil {
				first = &shards[i]
			}
			for _, p := range s.Pieces {
				if !seen[p.Name] {
					seen[p.Name] = true
					p.First, p.Count = 0, c.parameters[p.Name].Count
					pieces = append(pieces, p)
					elements += p.Count
				}
			}
		}
		if elements < int64(ranks) {
			return nil, fault.Inputf("part %s has %d elements, which cannot be divided among %d ranks", part, elements,
				ranks).WithHint("use fewer ranks")
		}
		for rank := range ranks {
			own := shard.Range{Count: elements}.Share(rank, ranks)
			all = append(all, Shard{
				Rank: rank, World: ranks, Part: part,
				Format: first.Format, Pieces: shard.Cut(pieces, own),
			})
		}
	}
	return all, nil
}

// convert writes a shard.
func (c *Checkpoint) convert(ctx context.Context, directory string, s Shard, progress func(bytes int64)) error {
	l, err := layoutOfPieces(s.Format, s.Pieces)
	if err != nil {
		return err
	}
	loader, err := c.newLoader(l, s.Rank)
	if err != nil {
		return err
	}
	w, err := newWriter(directory, s, l, c.step, trainingOf(c.files, s.Rank, s.Part))
	if err != nil {
		return err
	}
	err = loader.each(ctx, min(4, runtime.GOMAXPROCS(0)), nil, func(at shard.Chunk, chunk kernel.Chunk) error {
		if progress != nil {
			progress(bytesOfChunk(l, chunk))
		}
		if err := w.back.pace(ctx); err != nil {
			return err
		}
		return w.write(at.First, chunk)
	})
	if err == nil {
		err = w.finish()
	}
	if err != nil {
		return errors.Join(err, w.discard())
	}
	return nil
}

func bytesOfChunk(l *layout, c kernel.Chunk) int64 {
	var sum int64
	for _, s := range l.saved {
		sum += int64(len(c.Bytes(s.Role)))
	}
	return sum
}

// each fills chunk after chunk of the shard in its own memory and calls body with it.
// One worker goes in order; several call body concurrently. roles are the streams to
// fill; nil means all.
func (l *loader) each(
	ctx context.Context, count int, roles []kernel.Role, body func(at shard.Chunk, chunk kernel.Chunk) error,
) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	readers := readers{c: l.c, roles: readRoles(roles)}
	var next atomic.Int64
	var workers sync.WaitGroup
	for range count {
		workers.Go(func() {
			memory := map[kernel.Role][]byte{}
			for number := int(next.Add(1)) - 1; number < l.layout.Chunks &&
				ctx.Err() == nil; number = int(next.Add(1)) - 1 {
				at := l.layout.Chunk(number)
				chunk := l.layout.newChunk(memory, roles, at)
				r := readers.take(at.First)
				err := l.fill(r.reader, at, chunk)
				r.next = at.End()
				readers.giveBack(r)
				if err == nil {
					err = body(at, chunk)
				}
				if err != nil {
					cancel(err)
				}
			}
		})
	}
	workers.Wait()
	return errors.Join(context.Cause(ctx), readers.close())
}

// newChunk returns memory for a chunk. The next chunk uses it again.
func (l *layout) newChunk(memory map[kernel.Role][]byte, roles []kernel.Role, at shard.Chunk) kernel.Chunk {
	var c kernel.Chunk
	for i := range l.Streams {
		s := &l.Streams[i]
		switch own, _, ok := l.In(s, at); {
		case !ok || roles != nil && !slices.Contains(roles, s.Role) || s.Role == kernel.GradientRole:
		default:
			c.Set(s.Stream, room(memory, s.Role, s.BytesOf(own)))
		}
	}
	return c
}

// readRoles returns the streams that must be read to fill some roles.
func readRoles(roles []kernel.Role) map[kernel.Role]bool {
	if roles == nil {
		return nil
	}
	read := map[kernel.Role]bool{}
	for _, role := range roles {
		switch role {
		case kernel.MasterRole, kernel.ParameterRole, kernel.LowRole:
			read[kernel.MasterRole], read[kernel.ParameterRole], read[kernel.LowRole] = true, true, true
		default: // in int8, the second moment scales the first
			read[kernel.FirstMomentRole], read[kernel.SecondMomentRole], read[kernel.HeaderRole] = true, true, true
		}
	}
	return read
}
