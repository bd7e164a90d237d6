package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"sync"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/dtype"
	"plimsoll/fault"
	"plimsoll/optim/kernel"
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
	s.State.SetSteps(c.step)
	return c.step, c.training(s.Rank, s.Part), nil
}

// training returns the document that a rank has saved, or else the first document.
func (c *Checkpoint) training(rank int, part string) jsontext.Value {
	document := c.files[0].manifest.Training
	for _, f := range c.files {
		if f.manifest.Rank == rank && f.manifest.Part == part {
			document = f.manifest.Training
		}
	}
	document = slices.Clone(document)
	_ = document.Compact() // was valid when it was read
	return document
}

// run is a range of elements that is contiguous in the shard that is filled and in one
// section of a file.
type run struct {
	to, from, count int64 // elements: of the shard that is filled, and of the shard in the file
	file            int
}

// loader fills a shard.
type loader struct {
	c      *Checkpoint
	layout *layout // of the shard
	runs   []run   // in the order of the shard
}

// newLoader finds the elements of a shard in the files. If several ranks hold an
// element, it prefers the rank's own file.
func (c *Checkpoint) newLoader(l *layout, rank int) (*loader, error) {
	if own, theirs := l.format.Algorithm, c.Algorithm(); own != theirs {
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
		for first, end := p.First, p.First+p.Count; first < end; {
			s := known.at(first, func(s stretch) bool { return c.files[s.file].manifest.Rank == rank })
			count := min(end, s.end()) - first
			loader.add(run{at, s.at + first - s.first, count, s.file})
			first, at = first+count, at+count
		}
	}
	return loader, nil
}

func (c *Checkpoint) unsuitable(format string, arguments ...any) error {
	return &fault.Input{
		Where: fault.Position{File: c.path},
		What:  fmt.Sprintf("the checkpoint is of another training: "+format, arguments...),
	}
}

func (c *Checkpoint) lacks(name string) error {
	e := &fault.Input{
		Where: fault.Position{File: c.path},
		What:  fmt.Sprintf("the checkpoint has no parameter %q", name),
	}
	if nearest := fault.Nearest(name, c.names); nearest != "" {
		e.Hint = fmt.Sprintf("it has %q", nearest)
	}
	return e
}

// at returns a stretch that holds an element: a preferred one or, without any, the one
// that goes on the furthest. A complete checkpoint has one.
func (p *parameter) at(element int64, preferred func(stretch) bool) stretch {
	var found stretch
	for _, s := range p.stretches {
		if s.first > element || s.end() <= element {
			continue
		}
		if preferred(s) {
			return s
		}
		if s.end() > found.end() {
			found = s
		}
	}
	return found
}

// add appends a run. It extends the run before if the two are contiguous: a block of
// int8 moments may begin in one piece and end in the next.
func (l *loader) add(r run) {
	if last := len(l.runs) - 1; last >= 0 {
		before := &l.runs[last]
		section := func(element int64) int64 { return l.c.files[r.file].layout.sectionAt(element).first }
		if before.file == r.file && before.from+before.count == r.from && section(before.from) == section(r.from) {
			before.count += r.count
			return
		}
	}
	l.runs = append(l.runs, r)
}

// tasks returns the chunks that the runs need, each once.
func (l *loader) tasks() []task {
	needed := make([][]bool, len(l.c.files))
	for _, r := range l.runs {
		own := l.c.files[r.file].layout
		if needed[r.file] == nil {
			needed[r.file] = make([]bool, own.chunks)
		}
		for chunk := own.chunkAt(r.from); chunk <= own.chunkAt(r.from+r.count-1); chunk++ {
			needed[r.file][chunk] = true
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
	s.State.Each(func(first int64, chunk kernel.Chunk) {
		if !ok() {
			return
		}
		if ctx.Err() != nil {
			note(ctx.Err())
			return
		}
		r := readers.take(first)
		if err := l.fill(r.reader, first, chunk); err != nil {
			note(err)
		}
		r.next = first + l.layout.lengthAt(first)
		readers.giveBack(r)
	})
	return errors.Join(failed, readers.close())
}

// lengthAt returns the number of elements of the chunk that begins at an element.
func (l *layout) lengthAt(first int64) int64 {
	_, count := l.extent(l.chunkAt(first))
	return count
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
func (l *loader) fill(r *reader, first int64, to kernel.Chunk) error {
	count := l.layout.lengthAt(first)
	inBlocks := l.layout.sectionAt(first).Moments == kernel.MomentsInt8
	err := l.spans(r, first, count, func(at, n int, from kernel.Chunk, start int) {
		putMaster(l.layout.format, to, at, from, start, n)
		if !inBlocks {
			putMoments(to, at, from, start, n)
		}
	})
	if err != nil || !inBlocks {
		return err
	}
	for block := range to.Headers {
		if err := l.fillBlock(r, first, block, min(kernel.Block, int(count)-block*kernel.Block), to); err != nil {
			return err
		}
	}
	return nil
}

// spans divides count elements of the shard into ranges that lie in one chunk of a
// file, and calls body for each. A range is n elements: they begin at element first +
// at of the shard and at element start of the chunk.
func (l *loader) spans(r *reader, first, count int64, body func(at, n int, from kernel.Chunk, start int)) error {
	i := sort.Search(len(l.runs), func(i int) bool { return l.runs[i].to > first }) - 1
	for at := int64(0); at < count; {
		run := l.runs[i]
		skip := first + at - run.to
		own := l.c.files[run.file].layout
		number := own.chunkAt(run.from + skip)
		begin, length := own.extent(number)
		from, err := r.read(run.file, number)
		if err != nil {
			return err
		}
		start := run.from + skip - begin
		n := min(count-at, run.count-skip, length-start)
		body(int(at), int(n), from, int(start))
		if at += n; skip+n == run.count {
			i++
		}
	}
	return nil
}

// fillBlock fills a block of int8 moments. If its elements are a block in the file, too,
// it copies the bits. Else it encodes their values, rounded to nearest.
func (l *loader) fillBlock(r *reader, first int64, block, n int, to kernel.Chunk) error {
	var firsts, seconds [kernel.Block]float32
	begin, held := block*kernel.Block, false
	err := l.spans(r, first+int64(begin), int64(n), func(at, count int, from kernel.Chunk, start int) {
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
	fromSplit := from.Low != nil
	switch {
	case to.Master == nil && to.Low == nil: // not asked for
		return
	case format.State == kernel.Split && fromSplit:
		copy(to.Parameter[at:at+n], from.Parameter[start:])
		copy(to.Low[at:at+n], from.Low[start:])
		return
	case format.State == kernel.Split:
		for i, master := range from.Master[start : start+n] {
			to.Parameter[at+i], to.Low[at+i] = kernel.Separate(master)
		}
		return
	case fromSplit:
		for i := range n {
			to.Master[at+i] = kernel.Merge(from.Parameter[start+i], from.Low[start+i])
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
