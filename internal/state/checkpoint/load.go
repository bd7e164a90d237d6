package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"sync"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// ErrPartial is the error of [Checkpoint.Load] if files have changed since they were
// verified, and of [Checkpoint.LoadNew] if a file is damaged.
var ErrPartial = errors.New("the state is only partly loaded and must not be used")

// Load fills a shard from the checkpoint, whichever ranks, cuts and formats it was
// written from. It returns the step and the training document of the same rank and
// part, or else the first document.
//
// Load verifies everything that it will read before it overwrites anything. A shard
// that cannot be filled does not change.
func (c *Checkpoint) Load(ctx context.Context, s Shard) (step int64, training jsontext.Value, err error) {
	return c.load(ctx, s, func(l *loader) error { return c.verify(ctx, l.tasks(), false, nil) })
}

// LoadNew fills a shard that holds nothing worth keeping. It reads everything once,
// and verifies each chunk before it uses it.
func (c *Checkpoint) LoadNew(ctx context.Context, s Shard) (step int64, training jsontext.Value, err error) {
	return c.load(ctx, s, func(*loader) error { return nil })
}

func (c *Checkpoint) load(
	ctx context.Context, s Shard, first func(*loader) error,
) (step int64, training jsontext.Value, err error) {
	l, err := layoutOf(s)
	if err != nil {
		return 0, nil, err
	}
	loader, err := c.newLoader(l, s.Rank)
	if err != nil {
		return 0, nil, err
	}
	if err := first(loader); err != nil {
		return 0, nil, err
	}
	if err := loader.load(ctx, s); err != nil {
		return 0, nil, fmt.Errorf("%w: %w", ErrPartial, err)
	}
	if err := c.setSteps(s); err != nil {
		return 0, nil, err
	}
	return c.step, trainingOf(c.files, s.Rank, s.Part), nil
}

// loader fills a shard.
type loader struct {
	c      *Checkpoint
	layout *layout // of the shard
	// sources are where the elements of the shard are, in its order. Each is contiguous in one section of a file.
	sources []source
}

// newLoader finds the elements of a shard in the files. If several ranks hold an
// element, it prefers the rank's own file.
func (c *Checkpoint) newLoader(l *layout, rank int) (*loader, error) {
	if own, theirs := l.Format.Algorithm, c.Algorithm(); own != theirs {
		return nil, c.unsuitable("it is the state of %v, but the optimizer is %v: their moments mean different things",
			theirs, own)
	}
	loader := &loader{c: c, layout: l}
	at := int64(0)
	for _, p := range l.pieces {
		known := c.parameters[p.Name]
		if known == nil {
			return nil, c.lacks(p.Name)
		}
		if !slices.Equal(known.Shape, p.Shape) {
			return nil, c.unsuitable("parameter %q has the shape %v there, expected %v", p.Name, known.Shape, p.Shape)
		}
		for left := p.Range; left.Count > 0; {
			s := known.at(left.First, func(s source) bool { return c.files[s.file].manifest.Rank == rank })
			found := left.Intersect(s.Range)
			loader.add(source{found.Shift(at - found.First), s.file, s.from + found.First - s.First})
			left, at = shard.Between(found.End(), left.End()), at+found.Count
		}
	}
	return loader, nil
}

func (c *Checkpoint) unsuitable(format string, arguments ...any) error {
	return fault.File(c.path).Inputf("the checkpoint is of another training: %s", fmt.Sprintf(format, arguments...))
}

func (c *Checkpoint) lacks(name string) error {
	e := fault.File(c.path).Inputf("the checkpoint has no parameter %q", name)
	if nearest := fault.NearestParameter(name, c.names); nearest != "" {
		return e.WithHint(fmt.Sprintf("it has %q", nearest))
	}
	return e.WithHint("if it has it by another name, plimsoll checkpoint convert --rename writes a copy with this one")
}

// at returns a source that holds an element: a preferred one or, without any, the one
// that goes on the furthest. A complete checkpoint has one.
func (p *parameter) at(element int64, preferred func(source) bool) source {
	var found source
	for _, s := range p.sources {
		if !s.Contains(element) {
			continue
		}
		if preferred(s) {
			return s
		}
		if s.End() > found.End() {
			found = s
		}
	}
	return found
}

// add appends a source. It extends the source before if the two are contiguous: a block of
// int8 moments may begin in one piece and end in the next.
func (l *loader) add(s source) {
	if last := len(l.sources) - 1; last >= 0 {
		before, in := &l.sources[last], l.c.files[s.file].layout
		if before.file == s.file && before.from+before.Count == s.from &&
			in.SectionAt(before.from) == in.SectionAt(s.from) {
			before.Count += s.Count
			return
		}
	}
	l.sources = append(l.sources, s)
}

// tasks returns the chunks that the sources need, each once.
func (l *loader) tasks() []task {
	needed := make([][]bool, len(l.c.files))
	for _, s := range l.sources {
		in := l.c.files[s.file].layout
		if needed[s.file] == nil {
			needed[s.file] = make([]bool, in.Chunks)
		}
		chunks := in.ChunksOf(shard.Range{First: s.from, Count: s.Count})
		for chunk := chunks.First; chunk < chunks.End(); chunk++ {
			needed[s.file][chunk] = true
		}
	}
	var tasks []task
	for number, chunks := range needed {
		for from := 0; from < len(chunks); {
			end := from
			for end < len(chunks) && chunks[end] {
				end++
			}
			tasks = append(tasks, l.c.files[number].tasks(number, from, end)...)
			from = end + 1
		}
	}
	return tasks
}

// load has the shard's own workers fill it: so every new page lies near the worker
// that will update it.
func (l *loader) load(ctx context.Context, s Shard) error {
	readers := readers{c: l.c}
	var mutex sync.Mutex
	var failed error
	note := func(err error) {
		mutex.Lock()
		defer mutex.Unlock()
		failed = errors.Join(failed, err)
	}
	ok := func() bool {
		mutex.Lock()
		defer mutex.Unlock()
		return failed == nil
	}
	s.State.Each(func(at shard.Chunk, chunk kernel.Chunk) {
		if !ok() {
			return
		}
		if ctx.Err() != nil {
			note(ctx.Err())
			return
		}
		r := readers.take(at.First)
		if err := l.fill(r.reader, at, chunk); err != nil {
			note(err)
		}
		r.next = at.End()
		readers.giveBack(r)
	})
	return errors.Join(failed, readers.close())
}

// readers lends readers to workers. A worker gets the reader that stands at its next
// element, if there is one.
type readers struct {
	c     *Checkpoint
	roles map[kernel.Role]bool
	mutex sync.Mutex
	free  []*placed
}

type placed struct {
	*reader
	next int64 // element of the shard
}

func (x *readers) take(first int64) *placed {
	x.mutex.Lock()
	defer x.mutex.Unlock()
	if len(x.free) == 0 {
		r := x.c.newReader()
		r.roles, r.forget = x.roles, true
		return &placed{reader: r}
	}
	i := max(0, slices.IndexFunc(x.free, func(p *placed) bool { return p.next == first }))
	r := x.free[i]
	x.free = slices.Delete(x.free, i, i+1)
	return r
}

func (x *readers) giveBack(r *placed) {
	x.mutex.Lock()
	defer x.mutex.Unlock()
	x.free = append(x.free, r)
}

func (x *readers) close() error {
	var err error
	for _, r := range x.free {
		err = errors.Join(err, r.Close())
	}
	return err
}

// fill fills a chunk of the shard.
func (l *loader) fill(r *reader, c shard.Chunk, to kernel.Chunk) error {
	inBlocks := l.layout.FormatOf(c.Section).Moments == kernel.MomentsInt8
	err := l.read(r, c.Range, func(at, n int, from kernel.Chunk, start int) {
		putMaster(l.layout.Format, to, at, from, start, n)
		if !inBlocks {
			putMoments(to, at, from, start, n)
		}
	})
	if err != nil || !inBlocks {
		return err
	}
	for number := range to.Headers {
		first := int64(number) * kernel.Block
		block := shard.Range{First: first, Count: min(kernel.Block, c.Count-first)}
		if err := l.fillBlock(r, block.Shift(c.First), number, to); err != nil {
			return err
		}
	}
	return nil
}

// read reads a range of the shard, and calls body for each part of it that lies in one
// chunk of a file. A part is n elements: they begin at element at of the range and at
// element start of the chunk.
func (l *loader) read(r *reader, of shard.Range, body func(at, n int, from kernel.Chunk, start int)) error {
	i := sort.Search(len(l.sources), func(i int) bool { return l.sources[i].First > of.First }) - 1
	for left := of; left.Count > 0; {
		s := l.sources[i]
		toFile := s.from - s.First
		c := l.c.files[s.file].layout.ChunkAt(left.First + toFile)
		from, err := r.read(s.file, c.Number)
		if err != nil {
			return err
		}
		part := left.Intersect(s.Range).Shift(toFile).Intersect(c.Range)
		body(int(left.First-of.First), int(part.Count), from, int(part.First-c.First))
		left = shard.Between(left.First+part.Count, left.End())
		if left.First == s.End() {
			i++
		}
	}
	return nil
}

// fillBlock fills a block of int8 moments. If its elements are a block in the file, too,
// it copies the bits. Else it encodes their values, rounded to nearest.
func (l *loader) fillBlock(r *reader, elements shard.Range, block int, to kernel.Chunk) error {
	var firsts, seconds [kernel.Block]float32
	begin, n, held := block*kernel.Block, int(elements.Count), false
	err := l.read(r, elements, func(at, count int, from kernel.Chunk, start int) {
		codes := from.Moments[0]
		if held = count == n && isBlock(from, start, n); held {
			copy(to.Moments[0].Data[begin:], codes.Data[start:start+n])
			copy(to.Moments[1].Data[begin:], from.Moments[1].Data[start:start+n])
			to.Headers[block] = from.Headers[start/kernel.Block]
			return
		}
		for i := range count {
			firsts[at+i], seconds[at+i] = from.Moment(0, start+i), from.Moment(1, start+i)
		}
	})
	if err == nil && !held {
		to.PutBlock(block, firsts[:n], seconds[:n])
	}
	return err
}

// isBlock reports whether elements start to start + n of a chunk are a block. Chunks
// are cut between blocks.
func isBlock(c kernel.Chunk, start, n int) bool {
	end := start + n
	return c.Headers != nil && start%kernel.Block == 0 && (n == kernel.Block || end == c.Moments[0].Len())
}

// putMaster sets n master weights, and the parameters that are rounded from them.
func putMaster(format kernel.Format, to kernel.Chunk, at int, from kernel.Chunk, start, n int) {
	switch {
	case to.Master == nil && to.Low == nil && to.LowBytes == nil: // not asked for
		return
	case to.Low != nil && from.Low != nil:
		copy(to.Parameter[at:at+n], from.Parameter[start:])
		copy(to.Low[at:at+n], from.Low[start:])
		return
	case to.LowBytes != nil && from.LowBytes != nil:
		copy(to.Parameter[at:at+n], from.Parameter[start:])
		copy(to.LowBytes[at:at+n], from.LowBytes[start:])
		return
	case format.State != kernel.FP32:
		for i := range n {
			to.PutMasterWeight(format, at+i, masterWeight(from, start+i))
		}
		return
	case from.Master == nil:
		for i := range n {
			to.Master[at+i] = masterWeight(from, start+i)
		}
	default:
		copy(to.Master[at:at+n], from.Master[start:])
	}
	switch {
	case to.Parameter == nil:
	case format.Parameter == dtype.BF16:
		for i, master := range to.Master[at : at+n] {
			to.Parameter[at+i] = kernel.Float32ToBF16(master)
		}
	case format.Parameter == dtype.F16:
		for i, master := range to.Master[at : at+n] {
			to.Parameter[at+i] = kernel.Float32ToFP16(master)
		}
	}
}

// putMoments sets n elements of each moment. It rounds to nearest if the file has more
// digits.
func putMoments(to kernel.Chunk, at int, from kernel.Chunk, start, n int) {
	for number, moment := range to.Moments {
		switch theirs := from.Moments[number]; {
		case moment.Data == nil:
		case moment.Type == theirs.Type:
			copy(moment.Slice(at, at+n).Data, theirs.Slice(start, start+n).Data)
		default:
			for i := range n {
				moment.Put(at+i, from.Moment(number, start+i))
			}
		}
	}
}

// masterWeight returns a master weight of a file's chunk, in any state.
func masterWeight(c kernel.Chunk, i int) float32 {
	state := kernel.FP32
	if c.Low != nil {
		state = kernel.Split
	} else if c.LowBytes != nil {
		state = kernel.Split24
	}
	return c.MasterWeight(kernel.Format{State: state}, i)
}
