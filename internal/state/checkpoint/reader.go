package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"plimsoll/internal/base/files"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// reader reads chunks of the files of a checkpoint, one at a time, and verifies their
// checksums. It keeps the last chunk: a walk along the elements reads every chunk once,
// however the walk is cut.
type reader struct {
	c *Checkpoint
	// roles are the streams to read; nil means all.
	roles map[kernel.Role]bool
	// forget lets the page cache forget the bytes that were read.
	forget bool

	file   *os.File
	others OpenFiles // of another program
	number int       // of the open file
	chunk  int       // in memory; -1 for none
	state  kernel.Chunk
	memory map[kernel.Role][]byte
	walks  []walk // of each stream
}

// walk is a contiguous read of a stream of a file, from begin to end so far. The kernel
// was told to read ahead until ahead.
type walk struct{ begin, end, ahead int64 }

func (c *Checkpoint) newReader() *reader {
	return &reader{c: c, number: -1, chunk: -1, others: OpenFiles{}, memory: map[kernel.Role][]byte{}}
}

// Close closes the files that are open.
func (r *reader) Close() error {
	err := r.others.Close()
	if r.file != nil {
		err = errors.Join(err, r.file.Close())
	}
	r.file, r.number, r.chunk = nil, -1, -1
	return err
}

// open opens a file of the checkpoint, unless it is open.
func (r *reader) open(number int) error {
	if r.number == number {
		return nil
	}
	if err := r.Close(); err != nil {
		return err
	}
	f := r.c.files[number]
	if f.foreign != nil {
		r.number = number
		return nil
	}
	file, _, err := files.Open(f.path)
	if err != nil {
		return Cause(f.path, "", errors.Unwrap(err))
	}
	r.file, r.number, r.walks = file, number, make([]walk, len(f.layout.saved))
	return nil
}

// read returns a chunk of a file, without gradients. It is valid until the next call.
func (r *reader) read(number, chunk int) (kernel.Chunk, error) {
	if r.number == number && r.chunk == chunk {
		return r.state, nil
	}
	if err := r.open(number); err != nil {
		return kernel.Chunk{}, err
	}
	f := r.c.files[number]
	r.chunk, r.state = -1, kernel.Chunk{}
	for _, region := range f.layout.regions(chunk) {
		stream := f.layout.saved[region.stream]
		if r.roles != nil && !r.roles[stream.Role] {
			continue
		}
		b := room(r.memory, stream.Role, region.bytes)
		if err := r.fetch(f, chunk, region, b); err != nil {
			return kernel.Chunk{}, err
		}
		r.state.Set(stream.Stream.Stream, b)
	}
	r.chunk = chunk
	return r.state, nil
}

// fetch reads a chunk of a stream.
func (r *reader) fetch(f *file, chunk int, region region, b []byte) error {
	if f.foreign != nil { // the files were verified when they were opened
		role := f.layout.saved[region.stream].Role
		return f.foreign.read(r.others.Open, role, f.layout.Chunk(chunk).First, b)
	}
	at := f.manifest.Header + region.offset
	r.advise(region.stream, at, region.bytes)
	if _, err := r.file.ReadAt(b, at); err != nil {
		return CutShort(f.path, err)
	}
	if got, want := checksum(b), f.manifest.Streams[region.stream].Sums[region.sum]; got != want {
		return f.damage(chunk, region, got, want)
	}
	return nil
}

// CutShort returns the error for a file that could not be read, or not to its end.
func CutShort(path string, err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return Broken(path, "damaged: the file ends too early")
	}
	return Cause(path, "the file cannot be read", err)
}

// damage returns the error for a region whose checksum differs.
func (f *file) damage(chunk int, r region, got, want uint32) error {
	stream := f.layout.saved[r.stream]
	from := f.manifest.Header + r.offset
	return Broken(f.path, "damaged between bytes %d and %d: %s of %s has the checksum %08x, expected %08x",
		from, from+r.bytes, stream.Arena, f.pieceNames(chunk), got, want)
}

// pieceNames names the pieces that have elements in a chunk.
func (f *file) pieceNames(chunk int) string {
	own := f.layout.Chunk(chunk)
	var names []string
	at := shard.Range{}
	for _, p := range f.layout.pieces {
		at = shard.Range{First: at.End(), Count: p.Count}
		if at.Intersect(own.Range).Count > 0 {
			names = append(names, p.String())
		}
	}
	if len(names) > 3 {
		return fmt.Sprintf("%s to %s", names[0], names[len(names)-1])
	}
	return strings.Join(names, ", ")
}

// room returns memory for a stream of a chunk, aligned for every type.
func room(memory map[kernel.Role][]byte, role kernel.Role, bytes int64) []byte {
	if int64(cap(memory[role])) < bytes {
		words := make([]uint64, (bytes+7)/8)
		memory[role] = unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), 8*len(words))
	}
	return memory[role][:bytes]
}

// readAhead is how far the kernel reads ahead of a reader in each stream. A file is
// read at as many places as it has streams, which defeats the kernel's own guesses.
const readAhead = 8 << 20

// advise has the kernel read ahead, in steps of half of readAhead, and forget the bytes
// that the reader has left behind.
func (r *reader) advise(stream int, at, bytes int64) {
	w := &r.walks[stream]
	if w.end != at {
		*w = walk{at, at, at}
	}
	if w.ahead-at <= readAhead/2 {
		readSoon(r.file, w.ahead, at+readAhead-w.ahead)
		w.ahead = at + readAhead
	}
	if r.forget && at-w.begin >= readAhead {
		forget(r.file, w.begin, at-w.begin)
		w.begin = at
	}
	w.end = at + bytes
}

// task is a range of chunks of a stream to verify. They are contiguous in the file.
type task struct{ file, stream, from, end int }

// taskChunks keeps tasks large beside seeking and small beside a file.
const taskChunks = 128

// allTasks returns all chunks of all files.
func (c *Checkpoint) allTasks() []task {
	var tasks []task
	for number, f := range c.files {
		tasks = append(tasks, f.tasks(number, 0, f.layout.Chunks)...)
	}
	return tasks
}

// tasks returns chunks of every stream, in the order of the file.
func (f *file) tasks(number, from, end int) []task {
	var tasks []task
	for stream := range f.layout.saved {
		for at := from; at < end; at += taskChunks {
			tasks = append(tasks, task{number, stream, at, min(at+taskChunks, end)})
		}
	}
	return tasks
}

// Verify reads every byte of every file and verifies the checksums. Several goroutines
// call progress with the number of bytes read; it may be nil.
func (c *Checkpoint) Verify(ctx context.Context, progress func(bytes int64)) error {
	for _, f := range c.files {
		if err := verifyHeader(f.path, f.manifest.Header, f.manifest.HeaderSum); err != nil {
			return err
		}
	}
	return c.verify(ctx, c.allTasks(), true, progress)
}

// verifyHeader verifies the bytes before the data of a file.
func verifyHeader(path string, length int64, sum checksums) error {
	file, _, err := files.Open(path)
	if err != nil {
		return Cause(path, "", errors.Unwrap(err))
	}
	defer file.Close()
	header := make([]byte, length)
	if _, err := io.ReadFull(file, header); err != nil {
		return CutShort(path, err)
	}
	if got, want := checksum(header), sum[0]; got != want {
		return Broken(path, "damaged between bytes 0 and %d: the header has the checksum %08x, expected %08x",
			len(header), got, want)
	}
	return nil
}

// verify reads chunks with as many threads as keep a disk busy.
func (c *Checkpoint) verify(ctx context.Context, tasks []task, forget bool, progress func(bytes int64)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next atomic.Int64
	var readers sync.WaitGroup
	for range min(4, runtime.GOMAXPROCS(0)) {
		readers.Go(func() {
			r := c.newReader()
			r.forget = forget
			defer r.Close()
			for i := next.Add(1) - 1; i < int64(len(tasks)) && ctx.Err() == nil; i = next.Add(1) - 1 {
				if err := r.verify(ctx, tasks[i], progress); err != nil {
					cancel(err)
				}
			}
		})
	}
	readers.Wait()
	return context.Cause(ctx)
}

func (r *reader) verify(ctx context.Context, t task, progress func(bytes int64)) error {
	if err := r.open(t.file); err != nil {
		return err
	}
	f := r.c.files[t.file]
	r.chunk = -1 // its memory is used here
	for chunk := t.from; chunk < t.end; chunk++ {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		for _, region := range f.layout.regions(chunk) {
			if region.stream != t.stream {
				continue
			}
			if err := r.fetch(f, chunk, region,
				room(r.memory, f.layout.saved[t.stream].Role, region.bytes)); err != nil {
				return err
			}
			if progress != nil {
				progress(region.bytes)
			}
		}
	}
	return nil
}

// Bytes returns the number of bytes that Verify reports as progress.
func (c *Checkpoint) Bytes() int64 {
	var sum int64
	for _, f := range c.files {
		sum += f.layout.data
	}
	return sum
}
